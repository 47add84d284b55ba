"""The table of patches of mlx-lm, their probes, and the versions they fit."""
