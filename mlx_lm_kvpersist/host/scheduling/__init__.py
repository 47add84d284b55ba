"""The generation thread: the order of requests, and the number of tokens per step."""
