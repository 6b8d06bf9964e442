"""The protocols that clients speak: one module each, and what they share."""
