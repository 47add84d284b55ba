"""Proves the plugin on a tiny model of every architecture that mlx-lm has."""
