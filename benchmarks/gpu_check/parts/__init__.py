"""The parts of the check; each is one module with `run(work)`."""
