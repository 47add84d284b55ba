"""Caches as immutable blocks: cut, joined again, and checked by the canary."""
