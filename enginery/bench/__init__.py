"""The bench stage: how fast, beside what, how surely; and the report page of an artifact."""
