"""How much a turn writes, what sharing a system prompt saves, and what writing takes from others.

    python -m benchmarks.writes

A real server with a tiny model. A turn may write the KV of its new tokens, the one block that its
first tokens complete, and some bookkeeping; equal beginnings are stored once. Two clients decode
while a third has new turns, kept and not kept in pairs: their tokens a second are compared.
"""

from __future__ import annotations

import json
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from mlx_lm_kvpersist.api.admin import SPEC_PATH, STATS_PATH
from mlx_lm_kvpersist.store.index import Index
from tests.support import ServerProcess
from tests.support.synthetic import make_tiny_model, synthetic_text

from .report import Result
from .runs import median, parsed_out, ratio
from .servers import Fleet, cpu_between
from .stall import DecodingClient

N_TURNS = 8
N_SESSIONS = 10
N_PAIRS = 20
TURN_CHARS = 1500
"""Length of a turn beside which others decode: about 850 tokens."""
_AFTER_S = 0.4
BLOCK_TOKENS = 256
SYSTEM_CHARS = 14_300
"""Length of the shared system prompt: about 8K tokens of the tiny model's tokenizer."""


def main() -> None:
    out = parsed_out(__doc__)
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "model")
        with serve(model, Path(folder) / "turns") as server:
            result = Result(
                "writes-per-turn",
                "Bytes on disk that one turn of a growing conversation writes.",
                {"model": "tiny llama, 2 layers", "allowance": "one block and 16 KiB"},
                folder=out,
            )
            result.add(*turns(server, Path(folder) / "turns"))
            result.show()
        with serve(model, Path(folder) / "shared") as server:
            result = Result(
                "shared-system-prompt",
                "Ten sessions with one long system prompt.",
                {"model": "tiny llama, 2 layers"},
                folder=out,
            )
            result.add(*shared(server, Path(folder) / "shared"))
            result.show()
        # A block has as many bytes as one of a model of some billion weights.
        wide = make_tiny_model(Path(folder) / "wide", n_layers=4, n_heads=8, n_kv_heads=8)
        with Fleet(wide, ("ours-16",)) as fleet:
            result = Result(
                "beside-turns",
                "Tokens a second of two clients while a third has turns, kept and not kept.",
                {"model": "tiny llama, 4 layers of 8 heads", "sides": fleet.flags},
                folder=out,
            )
            result.add(*beside(fleet, "ours-16"))
            result.show()


def serve(model: Path, store: Path) -> ServerProcess:
    return ServerProcess(
        model,
        *("--plugin", "kvpersist", "--kvpersist-dir", str(store), "--kvpersist-min-free", "0"),
        *("--kvpersist-kv-bits", "4", "--kvpersist-kv-rotate", "off"),
    )


def turns(server: ServerProcess, store: Path) -> list[dict[str, Any]]:
    messages: list[dict[str, str]] = []
    rows = []
    n_before = written_before = 0
    for turn in range(N_TURNS):
        question = synthetic_text(300 + 400 * (turn % 3), seed=turn)
        messages.append({"role": "user", "content": question})
        reply = server.chat(messages, "growing", max_tokens=40)
        messages.append({"role": "assistant", "content": reply.text})
        n_tokens = reply.prompt_tokens + reply.completion_tokens
        stats = settled(server, store, "growing", n_tokens)
        per_token = bytes_per_token(server)
        written = stats["store"]["tiers"]["disk"]["written_bytes"]
        new = (n_tokens - n_before) * per_token
        rows.append(
            {
                "turn": turn + 1,
                "tokens": n_tokens,
                "new tokens": n_tokens - n_before,
                "KV of new tokens": new,
                "written": written - written_before,
                "beyond": written - written_before - new,
                "allowed beyond": BLOCK_TOKENS * per_token + 16 * 1024,
            }
        )
        n_before, written_before = n_tokens, written
    return rows


def shared(server: ServerProcess, store: Path) -> list[dict[str, Any]]:
    system = {"role": "system", "content": synthetic_text(SYSTEM_CHARS, seed=1)}
    rows = []
    alone = 0
    for n in range(N_SESSIONS):
        question = {"role": "user", "content": f"{n} {synthetic_text(100, seed=n)}"}
        reply = server.chat([system, question], f"session-{n}", max_tokens=20)
        n_tokens = reply.prompt_tokens + reply.completion_tokens
        stats = settled(server, store, f"session-{n}", n_tokens)
        written = stats["store"]["tiers"]["disk"]["written_bytes"]
        alone += n_tokens * bytes_per_token(server)
        rows.append(
            {
                "sessions": n + 1,
                "prompt tokens": reply.prompt_tokens,
                "reused": reply.cached_tokens,
                "blocks": stats["store"]["tiers"]["disk"]["blocks"],
                "written": written,
                "written / KV of all": written / alone,
            }
        )
    return rows


def beside(fleet: Fleet, side: str) -> list[dict[str, Any]]:
    kept: dict[bool, list[tuple[float, float, float]]] = {True: [], False: []}
    with ExitStack() as stack:
        asked = [[{"role": "user", "content": f"client {n}"}] for n in range(2)]
        others = [stack.enter_context(DecodingClient(fleet[side], one)) for one in asked]
        for pair in range(N_PAIRS):
            for is_kept in (pair % 2 == 0, pair % 2 == 1):
                text = f"{pair} {is_kept} {synthetic_text(TURN_CHARS, seed=pair)}"
                headers = {} if is_kept else {"X-KVPersist-Keep": "no"}
                before, start = fleet.used(side), time.time()
                fleet.ask(side, [{"role": "user", "content": text}], 16, headers=headers)
                took_s = time.time() - start
                time.sleep(_AFTER_S)  # what is written after the reply counts
                stop = time.time()
                rate = sum(len(one.gaps(start, stop)) for one in others) / (stop - start)
                cpu_s = cpu_between(before, fleet.used(side)) or 0.0
                kept[is_kept].append((rate, took_s, cpu_s))
    over_rate, over_s, over_cpu_s = (
        ratio([one[i] for one in kept[True]], [one[i] for one in kept[False]]) for i in range(3)
    )
    return [
        {
            "pairs": N_PAIRS,
            "tokens/s, kept": median([one[0] for one in kept[True]]),
            "tokens/s, not kept": median([one[0] for one in kept[False]]),
            "kept / not kept": over_rate,
            "whole turn, kept / not kept": over_s,
            "CPU s, kept / not kept": over_cpu_s,
        }
    ]


def bytes_per_token(server: ServerProcess) -> int:
    """Return what the server keeps of a token."""
    return int(json.loads(server.request("GET", SPEC_PATH)[2])["bytes_per_token"])


def settled(server: ServerProcess, store: Path, session: str, n_tokens: int) -> dict[str, Any]:
    """Return the server's stats once a turn of a session, of so many tokens, is on disk."""
    index = Index(store / "index.sqlite")
    deadline = time.monotonic() + 30
    try:
        while time.monotonic() < deadline:
            _, _, body = server.request("GET", STATS_PATH)
            stats: dict[str, Any] = json.loads(body)
            ends = {found.name: found.n_tokens for found in index.sessions()}
            if stats["store"]["queue"]["tasks"] == 0 and ends.get(session) == n_tokens:
                return stats
            time.sleep(0.02)
    finally:
        index.close()
    raise TimeoutError(f"the turn of {session} is not written")


if __name__ == "__main__":
    main()
