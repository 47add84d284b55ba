"""KV arrays: quantized caches, their batches and their blocks. Knows no server."""
