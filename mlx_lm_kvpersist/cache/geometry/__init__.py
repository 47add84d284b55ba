"""The geometry and precision of a model's caches, the model's fingerprint, and known facts.

A trace of the model gives the geometry. Facts are listed by architecture.
"""
