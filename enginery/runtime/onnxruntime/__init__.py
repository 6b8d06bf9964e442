"""ONNX Runtime: sessions, the runner, IOBinding, CUDA graphs and the placement of nodes."""
