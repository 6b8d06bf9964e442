"""Test and measure the GPU path on a machine with an NVIDIA GPU; see README.md beside this file.

$ python -m benchmarks.gpu_check
$ python -m benchmarks.gpu_check --device cpu --quick
"""
