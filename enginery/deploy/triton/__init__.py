"""Export an artifact to a model repository of NVIDIA Triton."""
