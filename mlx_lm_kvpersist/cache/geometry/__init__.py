"""What a model's caches are: found by running the model, never by its name."""
