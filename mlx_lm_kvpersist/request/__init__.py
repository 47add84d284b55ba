"""Requests: look up a prompt, restore it, save what was computed, and explain the result."""
