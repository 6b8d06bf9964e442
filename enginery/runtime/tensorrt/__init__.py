"""TensorRT, classic and for RTX: parsing graphs, building engines, reading their layers."""
