"""Look into a store while, or after, a server writes it."""

from __future__ import annotations

import json
import re
import sqlite3
from hashlib import sha256
from pathlib import Path

from tests.support import ServerProcess, wait_until


def n_tokens(store: Path, session: str) -> int:
    """Return how many tokens of a session's longest branch are committed."""
    path = store / "index.sqlite"
    if not path.exists():
        return 0
    db = sqlite3.connect(path, timeout=30)
    try:
        rows = db.execute("SELECT max(n_tokens) FROM sessions WHERE name = ?", (session,))
        return rows.fetchone()[0] or 0
    finally:
        db.close()


def wait_for_commit(store: Path, session: str, tokens: int) -> None:
    """Wait until a session's last turn is committed: the session then has `tokens` tokens."""
    wait_until(lambda: n_tokens(store, session) == tokens, f"{tokens} tokens of {session!r}")


def wait_for_writer(server: ServerProcess) -> None:
    """Wait until the server's writer is idle."""

    def is_idle() -> bool:
        stats = json.loads(server.request("GET", "/v1/kvpersist/stats")[2])
        return bool(stats["store"]["queue"]["tasks"] == 0)

    wait_until(is_idle, "nothing left to write", 60)


def wait_for_reply(server: ServerProcess) -> None:
    """Wait until the last reply is on disk.

    The reply is remembered right after its turn, before the next request is looked up.
    """
    server.chat([{"role": "user", "content": "Bye"}], max_tokens=1)
    wait_for_writer(server)


def block_files(store: Path) -> dict[str, str]:
    """Return the digest of every block file's bytes by its name."""
    return {
        path.name: sha256(path.read_bytes()).hexdigest()
        for path in (store / "blocks").rglob("*.safetensors")
    }


def n_computed(server: ServerProcess, start: int = 0) -> int:
    """Return how many prompts were computed, by the log from character `start` on."""
    progress = re.findall(r"Prompt processing progress: (\d+)/(\d+)", server.log[start:])
    return sum(done == total for done, total in progress)
