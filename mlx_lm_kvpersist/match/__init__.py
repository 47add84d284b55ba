"""Find stored token ids again: by the text they decode to, or what followed before. Knows no KV."""
