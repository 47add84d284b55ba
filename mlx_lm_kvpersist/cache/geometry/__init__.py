"""Classes, shapes and groups of a model's caches, found by tracing the model, never by its name."""
