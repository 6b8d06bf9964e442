"""The bench stage and the report page of an artifact."""
