"""`oci://registry/name:tag`: an image in an OCI registry."""
