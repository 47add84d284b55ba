"""Checks of all changes to mlx-lm: in the installed version, and in a matrix of versions.

`versions.toml` has the rows of the matrix, `supported.json` their results in the last run.
These results give the documentation's table and the bounds of the package's dependencies.
"""
