"""Check graphs for what TensorRT or CUDA rejects."""
