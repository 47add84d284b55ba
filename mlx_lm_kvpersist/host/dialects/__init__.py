"""Other APIs over stock's chat completions."""
