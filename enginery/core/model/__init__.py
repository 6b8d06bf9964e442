"""Models from elsewhere: where they are, what is in them, what in them is refused."""
