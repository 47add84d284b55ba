"""Find stored token ids again by the text they decode to. Knows no arrays."""
