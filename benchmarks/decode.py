"""Tokens per second, and bytes of live caches, while conversations are decoded together.

Every side has computed the prompts already. The rate is measured while all streams run. The plugin
reports the bytes of its live caches. Stock's bytes are computed: tokens, times the bytes of a token
in the model's own precision.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import mlx.core as mx

from mlx_lm_kvpersist.api.admin import SPEC_PATH, STATS_PATH
from tests.support import Reply
from tests.support.synthetic import Message

from .checks import SERVED, WrongMeasurement, repeated
from .runs import Run, tokens
from .servers import OURS, STOCK, BenchmarkServer, rotated

QUESTION, MEMORY = "replies at the same time", "live KV bytes"
_OWN_TOKENS = 256
"""The prompts differ in this number of tokens at their end."""
_N_SHORTER = 192
"""A prompt named 4K has this number of tokens less, so that replies do not fill its last block."""
_WARM_UP_TOKENS = 4


def measure(
    run: Run, batches: Mapping[int, Sequence[int]], n_repeats: int, max_tokens: int
) -> None:
    """`batches` maps a length of prompts to numbers of conversations."""
    sides = run.sides()
    with run.fleet(sides) as fleet:
        for context, sizes in batches.items():
            prompts = _prompts(run, context, max(sizes))
            for side in sides:
                for prompt in prompts:
                    fleet[side].ask(prompt, _WARM_UP_TOKENS, SERVED)
                    fleet[side].settle()
            for n in sorted(sizes, reverse=True):
                for side in sides:  # compiles the kernels for batches of this size
                    _decode(fleet[side], prompts[:n], context, _WARM_UP_TOKENS)
                for repeat in range(n_repeats):
                    for side in rotated(sides, repeat):
                        rate = _rate(_decode(fleet[side], prompts[:n], context, max_tokens))
                        what = f"{n} of {tokens(context)}"
                        run.report.add(QUESTION, what, side, "tokens/s", rate)
                        fleet[side].settle()
            _measure_memory(run, fleet[OURS], prompts, context, max_tokens)
    shared = (
        f"prompts have {_N_SHORTER} tokens less than their names say, and differ only in "
        f"their last {_OWN_TOKENS} tokens"
    )
    run.report.note(QUESTION, f"Replies of {max_tokens} tokens; {shared}.")
    run.report.note(MEMORY, "Stock's bytes are computed from the model's cache in full precision.")


def _prompts(run: Run, context: int, n: int) -> list[list[Message]]:
    n_tokens = context - _N_SHORTER
    n_shared = max(_OWN_TOKENS // 4, n_tokens - _OWN_TOKENS)
    system: Message = {
        "role": "system",
        "content": run.prompts.of_length(n_shared, 7_000_000 + context)[0]["content"],
    }
    return [run.prompts.filled([system], n_tokens, 7_100_000 + i) for i in range(n)]


def _decode(
    server: BenchmarkServer, prompts: Sequence[list[Message]], context: int, max_tokens: int
) -> list[tuple[float, Reply]]:
    """Send prompts at the same time; return when each was sent (seconds), and its reply."""
    hot = repeated(context - _N_SHORTER)

    def stream(prompt: list[Message]) -> tuple[float, Reply]:
        sent_s = time.perf_counter()
        return sent_s, server.ask(prompt, max_tokens, hot)

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(stream, prompts))


def _rate(streams: Sequence[tuple[float, Reply]]) -> float:
    """Return tokens per second while all streams run.

    Raises WrongMeasurement if a stream ended before the last stream began.
    """
    times = [[sent_s + at_s for at_s in reply.times_s] for sent_s, reply in streams]
    start, stop = max(each[0] for each in times), min(each[-1] for each in times)
    if stop <= start:
        raise WrongMeasurement("the run ends: the replies did not run at the same time")
    return sum(start < at_s <= stop for each in times for at_s in each) / (stop - start)


def _measure_memory(
    run: Run,
    server: BenchmarkServer,
    prompts: Sequence[list[Message]],
    context: int,
    max_tokens: int,
) -> None:
    with ThreadPoolExecutor(1) as pool:
        streams = pool.submit(_decode, server, prompts, context, max_tokens)
        live_bytes = _most_live_bytes(server, streams)
    n_tokens = sum(r.prompt_tokens + r.completion_tokens for _, r in streams.result())
    full_bytes = n_tokens * full_bytes_per_token(server.get(SPEC_PATH))
    what = f"{len(prompts)} of {tokens(context)}"
    run.report.add(MEMORY, what, OURS, "MB", live_bytes / 1e6)
    run.report.add(MEMORY, what, STOCK, "MB", full_bytes / 1e6)


def _most_live_bytes(server: BenchmarkServer, streams: Future[Any]) -> int:
    most = 0
    while not streams.done():
        most = max(most, server.get(STATS_PATH)["memory"]["caches"])
        time.sleep(0.02)
    if not most:
        raise RuntimeError("the server reports no live KV bytes")
    return most


def full_bytes_per_token(spec: Mapping[str, Any]) -> float:
    """Return a token's KV bytes in the model's own precision, for layers that keep all tokens.

    spec: the server's answer to /v1/kvpersist/spec.
    """
    sizes = [
        len(group["slots"]) * shape["n_heads"] * shape["dim"] * getattr(mx, shape["dtype"]).size
        for group in spec["groups"]
        if group["kind"] == "full"
        for shape in (group["keys"], group["values"])
    ]
    return float(sum(sizes))
