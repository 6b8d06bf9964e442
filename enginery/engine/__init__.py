"""Stage: TensorRT engines, ahead of time: profiles, builds, their ONNX wrappers."""
