"""Tests of the KV arrays, on tiny random models in float32."""
