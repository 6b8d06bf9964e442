"""Read, write, traverse and clean up graphs."""
