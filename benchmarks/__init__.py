"""Benchmarks: each is a command that saves results as JSON; tables are made from the results."""
