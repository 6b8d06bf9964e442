"""Generate tokens: options, search, and the state of a decoder."""
