"""The PyTorch model that graphs and answers are compared with, and the process that runs it."""
