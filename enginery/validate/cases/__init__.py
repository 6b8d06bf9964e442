"""Test cases: shapes, the profiles of engines, real inputs."""
