"""Export models without Optimum: our own tasks, inputs and dims, lowered by PyTorch's exporters."""
