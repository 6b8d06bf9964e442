"""Cast graphs to FP16 or BF16, and find the nodes that must stay FP32."""
