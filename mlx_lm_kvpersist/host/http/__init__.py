"""The server's HTTP side, and the checks of requests."""
