"""KV arrays: quantized caches, batches and blocks. This package does not use the server."""
