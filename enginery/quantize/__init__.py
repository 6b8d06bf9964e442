"""Stage: INT8 and FP8 in explicit Q/DQ that TensorRT accepts. Not there yet."""
