"""How much a turn writes, and what sharing a system prompt saves.

    python -m benchmarks.writes

A real server with a tiny model. A turn may write the KV of its new tokens, the one block that its
first tokens complete, and some bookkeeping; equal beginnings are stored once.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

from mlx_lm_kvpersist.api.admin import SPEC_PATH, STATS_PATH
from mlx_lm_kvpersist.store.index import Index
from tests.support import ServerProcess
from tests.support.synthetic import make_tiny_model, synthetic_text

from .report import Result
from .runs import parsed_out

N_TURNS = 8
N_SESSIONS = 10
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
