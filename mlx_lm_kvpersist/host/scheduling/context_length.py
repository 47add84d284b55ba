"""The most tokens that a prompt may have, by the context length in a model's files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache

from ...errors import RequestRefused

_LENGTHS = (
    *("max_position_embeddings", "n_positions", "n_ctx"),
    *("max_sequence_length", "max_seq_length", "max_seq_len", "seq_length", "seq_len"),
)
"""Fields of a config.json with the tokens that a model was trained for."""
_TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
"""Where a model that also reads images has the configuration of its text."""
_STRETCHES = ("linear", "dynamic")
"""Kinds of rope scaling whose factor multiplies the length in the same configuration."""
_UNSTATED = 10**9
"""Tokenizers without a limit state 1e30."""


def max_context(model: str, tokenizer: Any) -> int | None:
    """Return a loaded model's context length in tokens, None if its files do not state it.

    model: a folder, or a repository of Hugging Face in this machine's cache.
    The largest of several lengths counts: a wrong refusal is worse than none. A tokenizer alone
    does not count, because it is often another model's.
    """
    folder = Path(model)
    try:
        is_folder = folder.exists()
        file = folder / "config.json" if is_folder else try_to_load_from_cache(model, "config.json")
        config = json.loads(Path(str(file)).read_text(encoding="utf-8"))
        stated = length_of(config)
    except (OSError, ValueError, TypeError, AttributeError, OverflowError):
        return None
    own = getattr(tokenizer, "model_max_length", None)
    if stated and isinstance(own, int) and own < _UNSTATED:
        return max(stated, own)
    return stated


def length_of(config: Mapping[str, Any]) -> int | None:
    """Return the context length, in tokens, that a configuration states, or None.

    https://huggingface.co/docs/transformers/internal/rope_utils has the fields of rope scaling.
    """
    for inner in (config, *(config.get(name) for name in _TEXT_CONFIGS)):
        stated = inner if isinstance(inner, Mapping) else {}
        length = next((stated[name] for name in _LENGTHS if _is_length(stated.get(name))), None)
        if length is not None:
            rope = stated.get("rope_scaling") or stated.get("rope_parameters")
            scaling = rope if isinstance(rope, Mapping) else {}
            factor, kind = scaling.get("factor"), scaling.get("rope_type", scaling.get("type"))
            before = scaling.get("original_max_position_embeddings")
            if before is None and kind in _STRETCHES:
                before = length
            if isinstance(factor, int | float) and before is not None and _is_length(before):
                length = max(length, int(factor * before))
            return int(length)
    return None


def _is_length(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < _UNSTATED


def check_length(n_tokens: int, most: int | None) -> None:
    """Refuse a prompt that is longer than its model's context.

    The message is Anthropic's, the code is OpenAI's: clients recognise them and shorten the
    conversation.
    """
    if most is not None and n_tokens > most:
        message = f"prompt is too long: {n_tokens} tokens > {most} maximum"
        raise RequestRefused(message, code="context_length_exceeded")
