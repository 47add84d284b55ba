"""Checks the patch table against the installed mlx-lm; CI runs it for many versions."""
