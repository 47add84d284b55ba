"""The text that a model's precision is measured on: a short conversation as agents have them.

Prose, code, a tool's JSON and an answer with a diff, in the model's own chat template.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_MESSAGES = Path(__file__).with_name("sample.json")
_LEAST_TOKENS = 256


def sample_ids(tokenizer: Any) -> list[int]:
    """Return the conversation's token ids: about 1,600, beginning as prompts do."""
    messages: list[dict[str, str]] = json.loads(_MESSAGES.read_text(encoding="utf-8"))
    if getattr(tokenizer, "has_chat_template", False):
        for given in (messages, messages[1:]):  # some templates know no system prompt
            try:
                ids = list(tokenizer.apply_chat_template(given, add_generation_prompt=False))
            except Exception:  # templates raise exceptions of many classes
                continue
            if len(ids) >= _LEAST_TOKENS:  # others render messages of other forms alone
                return ids
    return list(tokenizer.encode("\n\n".join(message["content"] for message in messages)))
