"""The model card of a package: `README.md`."""
