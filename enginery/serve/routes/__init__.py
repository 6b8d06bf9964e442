"""The routes: one module for each protocol that clients speak."""
