"""Source models: finding, screening and reading their files, and confining their code."""
