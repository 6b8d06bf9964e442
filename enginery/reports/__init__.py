"""The types that stages write, each with the rows that people see."""
