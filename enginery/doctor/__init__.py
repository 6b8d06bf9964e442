"""What this machine can run, and what to install to run more."""
