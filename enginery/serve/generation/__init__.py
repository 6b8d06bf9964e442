"""Generate texts for requests: their inputs, and the batch that they share."""
