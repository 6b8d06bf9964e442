"""Test and measure the GPU path on a machine with an NVIDIA GPU; see docs/gpu-check.md.

$ python -m benchmarks.gpu_check
$ python -m benchmarks.gpu_check --device cpu --quick
"""
