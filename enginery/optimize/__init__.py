"""Stage: graph fusions for CUDA; FP16/BF16 for CUDA or TensorRT. Not there yet."""
