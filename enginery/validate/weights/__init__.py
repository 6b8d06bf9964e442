"""Compare every weight of a graph with PyTorch's, in full and without running either."""
