"""The export stage: from a Hugging Face model or an existing .onnx file to an ONNX artifact."""
