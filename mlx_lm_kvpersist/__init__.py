"""Persistent memory for `mlx_lm.server`."""

__version__ = "0.1.0"
