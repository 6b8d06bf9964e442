"""The report page of an artifact: tables, figures and advice."""
