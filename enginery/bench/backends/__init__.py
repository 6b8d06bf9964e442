"""The models and libraries that are measured, each in a process of its own."""
