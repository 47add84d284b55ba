"""KV arrays: 4-bit caches, their batch, and their blocks. Knows no server."""
