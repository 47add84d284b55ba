"""The table of patches of mlx-lm, their probes, and the versions for which they work."""
