"""What other servers load: an artifact as files for Triton and KServe."""
