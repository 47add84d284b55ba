"""Checks of everything that is changed in mlx-lm: in the installed one, and in a matrix of them.

`versions.toml` has the rows of the matrix, `supported.json` what came of them when it was last run.
The table in the documentation and the bounds of the package's dependencies are written from it.
"""
