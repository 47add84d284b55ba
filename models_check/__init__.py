"""Tests the plugin with the zoo: tiny models of every architecture that mlx-lm has."""
