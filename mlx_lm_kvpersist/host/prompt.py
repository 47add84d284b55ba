"""A prompt on its way to the model, and token ids that know which plugin took the request."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, SupportsIndex, overload

PREFILL = "prefill"
"""The cache type of a prompt that is still being computed, for the hook `insert_cache`."""


@dataclass(frozen=True)
class PrefillLimits:
    """A plugin's answer to `prefill_limits`.

    `max_stall_s` is how long a reply may wait for its next token while prompts are computed.
    `most_tokens(position)` is how many tokens may be computed at once after so many cached ones.
    `max_unused_bytes` is how much freed memory MLX may keep for the next chunk.
    """

    max_stall_s: float
    most_tokens: Callable[[int], int]
    max_unused_bytes: int = 1 << 30


@dataclass(frozen=True)
class Prompt:
    """A tokenized prompt, cut into segments as `ResponseGenerator._tokenize` does.

    The segments joined are `ids`; `segment_types` names each as "system", "user" or "assistant".
    """

    ids: list[int]
    segments: list[list[int]]
    segment_types: list[str]


@dataclass
class Prepared:
    """A plugin's answer to `take_request`.

    `prompt` is what the model reads. `caches`, one per layer, hold its first `n_cached` tokens, at
    least one less than all; None stands for empty caches. `handle` comes back to the plugin with
    `insert_cache`.
    """

    prompt: Prompt
    caches: list[Any] | None = None
    n_cached: int = 0
    handle: Any = None
    plugin: Any = None
    """The plugin that answered; set by the server."""
    reply: Any = None
    """Where its tokens go (`reply.ReplyQueue`); set by the server."""


class TakenTokens(list[int]):
    """Token ids of a request that a plugin took.

    The stock server passes a prompt's ids, and slices of them, through the batch generator and back
    to the prompt cache. It passes nothing else of the request. Slices and in-place appends keep
    `taken`.
    """

    def __init__(self, ids: Iterable[int], taken: Prepared) -> None:
        super().__init__(ids)
        self.taken = taken

    @overload
    def __getitem__(self, index: SupportsIndex) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> TakenTokens: ...
    def __getitem__(self, index: SupportsIndex | slice) -> int | TakenTokens:
        if isinstance(index, slice):
            return TakenTokens(super().__getitem__(index), self.taken)
        return super().__getitem__(index)
