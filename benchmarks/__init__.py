"""Benchmarks: one command each, results as JSON that is kept, tables made from it."""
