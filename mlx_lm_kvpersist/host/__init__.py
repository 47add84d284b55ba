"""The seams of `mlx_lm.server`. Knows mlx_lm and no KV."""
