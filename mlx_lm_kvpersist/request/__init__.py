"""The generation thread's view: prepare a prompt, look it up, keep what was computed."""
