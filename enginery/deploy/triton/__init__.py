"""An artifact as a model repository of NVIDIA Triton."""
