"""Benchmarks: one command each, saved results as JSON, and tables made from these."""
