"""The generation thread: which request is computed next, and how much of it at once."""
