"""Stage: INT8 in explicit Q/DQ that TensorRT accepts, calibrated on real inputs."""
