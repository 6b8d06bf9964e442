"""What a server tells of its requests: a record of each, metrics, an access log and traces."""
