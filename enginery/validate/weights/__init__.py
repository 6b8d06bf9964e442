"""Compare every weight of a graph with the reference's, in full and without running either."""
