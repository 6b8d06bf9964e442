"""Recognize scaled dot-product attention, and write it as one operator of ONNX Runtime."""
