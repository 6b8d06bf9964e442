"""Files from strangers: which are refused, what may run, how large anything may be."""
