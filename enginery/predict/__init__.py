"""Stage: a model's answers to every row of a file, or to every image of a folder."""
