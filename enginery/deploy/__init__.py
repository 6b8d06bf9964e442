"""Export artifacts for other servers: Triton and KServe."""
