"""Quantize graphs: explicit Q/DQ for TensorRT, dynamic INT8 for the CPU."""
