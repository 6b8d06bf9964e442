"""Export an artifact as a KServe InferenceService."""
