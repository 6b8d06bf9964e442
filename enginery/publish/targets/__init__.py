"""Registries: a folder, MLflow, the Hugging Face Hub, OCI."""
