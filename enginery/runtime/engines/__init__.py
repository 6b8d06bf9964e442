"""Choose the TensorRT engines of an artifact that run on this machine."""
