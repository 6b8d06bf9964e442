"""An artifact as an InferenceService of KServe."""
