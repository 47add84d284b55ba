"""Abilities of the installed mlx-lm that differ between versions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import ChunkedKVCache

from mlx_lm_kvpersist.host.patching import versions

from .server_process import ServerProcess

_IS_BEFORE_0_32 = versions.parse(versions.installed("mlx-lm")) < (0, 32, 0)


def keeps_short_chunks() -> bool:
    """Tell whether ChunkedKVCache works for chunks shorter than the 256 tokens that it grows by.

    In 0.31.3 it trims its buffer where it should trim its tokens.
    """
    cache = ChunkedKVCache(16)
    one = mx.zeros((1, 1, 1, 4))
    cache.update_and_fetch(one, one)
    cache.maybe_trim_front()
    return int(cache.start_position) == 0


def ignores_empty_stop_words() -> bool:
    """Tell whether `stop: [""]` changes nothing: 0.31.3 ends the reply before its first token."""
    return not _IS_BEFORE_0_32


def serves_holes() -> bool:
    """Tell whether a byte-level vocabulary may have holes between its ids.

    0.31.3 makes its detokenizer's table too short: an IndexError ends the generation thread at the
    first request, with or without the plugin.
    """
    return not _IS_BEFORE_0_32


def reads_lists_of_calls() -> bool:
    """Tell whether mlx-lm's parser for Mistral reads `[TOOL_CALLS] [{"name": ...}]`.

    In 0.31.3 it reads only `[TOOL_CALLS]name[ARGS]{...}`. Clients get no calls in a list.
    """
    return not _IS_BEFORE_0_32


def answers_wrong_fields() -> bool:
    """Tell whether a field of a wrong type is an error with a status.

    0.31.3 closes the connection, and serves nothing after a stop word that is a number.
    """
    return not _IS_BEFORE_0_32


def samples_with_xtc() -> bool:
    """Tell whether a request may have an xtc_probability.

    Sampling fails on 0.31.3, with or without the plugin: it makes an array of an id and a list.
    """
    return not _IS_BEFORE_0_32


def heed_biases(server: ServerProcess) -> None:
    """Make the server apply the logit_bias of the next request.

    0.31.3 ignores the bias of the first request after a request without a bias, also without the
    plugin. The new sequence takes over the earlier place in the batch, which has no bias.
    """
    if _IS_BEFORE_0_32:
        server.chat([{"role": "user", "content": "Bye"}], max_tokens=1, logit_bias={"0": -1.0})


def n_not_sent(tokenizer: Any, ids: Sequence[int]) -> int:
    """Return how many tokens are not sent at the end of a reply that max_tokens cut.

    0.31.3 does not finalize its detokenizer: broken characters and a single space at the end wait
    for text that never comes. No client can send them back.
    """
    if not _IS_BEFORE_0_32:
        return 0
    detokenizer, n_sent = tokenizer.detokenizer, 0
    for n, token_id in enumerate(ids, start=1):
        detokenizer.add_token(token_id)
        if detokenizer.last_segment:
            n_sent = n
    return len(ids) - n_sent
