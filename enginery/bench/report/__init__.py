"""The report page of an artifact: tables, curves, advice."""
