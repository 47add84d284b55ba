"""Caches while they are computed on: one sequence, a batch, and attention over packed keys."""
