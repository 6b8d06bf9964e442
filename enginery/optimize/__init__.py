"""The optimize stage: graph fusions for ONNX Runtime; FP16 and BF16 for CUDA and TensorRT."""
