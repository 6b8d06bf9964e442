"""`file:///path`: a registry that is a folder."""
