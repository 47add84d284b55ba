"""Where blocks live: a pool in RAM, files and an index on disk."""
