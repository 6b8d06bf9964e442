"""The version of the package, importable below the package's public face."""

__version__ = "0.1.0"
