"""The caches of running sequences, alone or in a batch, and attention over packed keys."""
