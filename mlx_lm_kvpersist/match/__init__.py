"""Find stored token ids by the text that they decode to, or by the ids before them. Knows no KV."""
