"""kill -9 as soon as a client has its reply: all but the last block of it is on disk.

The index and the files are written without fsync: they outlive the process, not the machine.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from mlx_lm_kvpersist.cache.blocks import BLOCK_TOKENS
from tests.support import Message, Reply, ServerProcess, make_tiny_model, synthetic_text

LONGEST_S = 0.1
"""The longest time from the last byte to a kill."""
SHORT, LONG = 20, 600
"""The most tokens of replies: half of them are short, and end before their prompt is written."""


@dataclass
class Left:
    """Tokens of a prompt, of its reply, and of both that the next turn reuses."""

    n_prompt: int
    n_reply: int
    n_reused: int

    @property
    def lost_of_prompt(self) -> int:
        return max(0, self.n_prompt - self.n_reused)

    @property
    def lost(self) -> int:
        """Lost tokens of both. The last token was sampled, and not computed."""
        return self.n_prompt + self.n_reply - 1 - self.n_reused


class Client:
    """A conversation of one new prompt, and its next turn after the kill."""

    def __init__(self, number: int, n_chars: int, rng: random.Random) -> None:
        self._session, self._rng = f"talk {number}", rng
        text = f"{number}. {synthetic_text(n_chars, seed=number)}"
        self._messages: list[Message] = [{"role": "user", "content": text}]
        self.reply: Reply | None = None

    def ask(self, server: ServerProcess, ended: threading.Event) -> None:
        n_reply = self._rng.randint(1, self._rng.choice((SHORT, LONG)))
        streams = self._rng.random() < 0.5
        try:
            self.reply = server.chat(self._messages, self._session, streams, max_tokens=n_reply)
        except Exception:
            if not ended.is_set():
                raise  # else the server was killed
        ended.set()

    def left(self, server: ServerProcess) -> Left:
        assert self.reply is not None
        said: Message = {"role": "assistant", "content": self.reply.text}
        messages = [*self._messages, said, {"role": "user", "content": "Go on."}]
        again = server.chat(messages, self._session, max_tokens=1)
        counts = self.reply.prompt_tokens, self.reply.completion_tokens
        return Left(*counts, int(again.kvpersist["reused"]))


def killed(server: ServerProcess, n_kills: int, n_clients: int, n_chars: int) -> Iterator[Left]:
    """Kill a server `n_kills` times, each time after the first end of a reply; yield the rest."""
    rng = random.Random(n_clients)
    for kill in range(n_kills):
        clients = [Client(n_clients * kill + n, n_chars, rng) for n in range(n_clients)]
        ended = threading.Event()
        with ThreadPoolExecutor(n_clients) as pool:
            asked = [pool.submit(client.ask, server, ended) for client in clients]
            assert ended.wait(60)
            time.sleep(rng.uniform(0, LONGEST_S))
            server.kill9()
        for one in asked:
            one.result()
        server.start()
        yield from (client.left(server) for client in clients if client.reply is not None)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("n_kills", "n_clients", "n_chars"),
    [(2, 2, 1500), *(pytest.param(200, n, 3000, marks=pytest.mark.slow) for n in (1, 4))],
)
def test_what_the_client_has_read_outlives_a_kill(
    tmp_path: Path, n_kills: int, n_clients: int, n_chars: int
) -> None:
    # It computes quickly, and its blocks are large.
    model = make_tiny_model(tmp_path / "model", n_layers=4, n_heads=8, n_kv_heads=8)
    plugin = ("--plugin", "kvpersist", "--kvpersist-dir", str(tmp_path / "store"))
    with ServerProcess(model, *plugin, log_path=tmp_path / "server.log") as server:
        left = list(killed(server, n_kills, n_clients, n_chars))
    print(f"lost after {n_kills} kills: {sorted(one.lost for one in left)}")
    assert len(left) >= n_kills
    assert max(one.lost_of_prompt for one in left) <= BLOCK_TOKENS, left
    assert max(one.lost for one in left) < 2 * BLOCK_TOKENS, left
