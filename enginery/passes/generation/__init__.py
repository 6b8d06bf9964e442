"""Make the graphs of decoders cheaper to generate with."""
