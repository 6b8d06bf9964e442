"""ONNX Runtime: sessions, what runs them, their buffers, and where their nodes run."""
