"""Graph passes: an `onnx_ir.Model` in, the same model edited out. Stages import them."""
