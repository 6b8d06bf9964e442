"""TensorRT, of either flavor: whether it takes a graph, and the engine that it makes of it."""
