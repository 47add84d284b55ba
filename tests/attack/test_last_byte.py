"""After kill -9 right after a reply, all but the reply's last block is on disk.

The index and the files are written without fsync: they survive a kill, not a power failure.
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
"""Maximum tokens of replies: half of the replies are short, and end before the prompt is saved."""


@dataclass
class TokenCounts:
    """The tokens of a prompt, of its reply, and those of both that the next turn reuses."""

    n_prompt: int
    n_reply: int
    n_reused: int

    @property
    def lost_of_prompt(self) -> int:
        return max(0, self.n_prompt - self.n_reused)

    @property
    def lost(self) -> int:
        """Lost tokens of prompt and reply. The reply's last token was sampled, but not computed."""
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
                raise  # otherwise the server was killed
        ended.set()

    def next_turn(self, server: ServerProcess) -> TokenCounts:
        assert self.reply is not None
        assistant: Message = {"role": "assistant", "content": self.reply.text}
        messages = [*self._messages, assistant, {"role": "user", "content": "Go on."}]
        again = server.chat(messages, self._session, max_tokens=1)
        counts = self.reply.prompt_tokens, self.reply.completion_tokens
        return TokenCounts(*counts, int(again.kvpersist["reused"]))


def kill_repeatedly(
    server: ServerProcess, n_kills: int, n_clients: int, n_chars: int
) -> Iterator[TokenCounts]:
    """Kill a server `n_kills` times, each time after one reply has ended; yield the counts."""
    rng = random.Random(n_clients)
    for kill in range(n_kills):
        clients = [Client(n_clients * kill + n, n_chars, rng) for n in range(n_clients)]
        ended = threading.Event()
        with ThreadPoolExecutor(n_clients) as pool:
            asked = [pool.submit(client.ask, server, ended) for client in clients]
            assert ended.wait(60)
            time.sleep(rng.uniform(0, LONGEST_S))
            server.kill9()
        for future in asked:
            future.result()
        server.start()
        yield from (client.next_turn(server) for client in clients if client.reply is not None)


@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("n_kills", "n_clients", "n_chars"),
    [(2, 2, 1500), *(pytest.param(200, n, 3000, marks=pytest.mark.slow) for n in (1, 4))],
)
def test_reply_received_by_a_client_survives_a_kill(
    tmp_path: Path, n_kills: int, n_clients: int, n_chars: int
) -> None:
    # This model computes quickly and has large blocks.
    model = make_tiny_model(tmp_path / "model", n_layers=4, n_heads=8, n_kv_heads=8)
    plugin = ("--plugin", "kvpersist", "--kvpersist-dir", str(tmp_path / "store"))
    with ServerProcess(model, *plugin, log_path=tmp_path / "server.log") as server:
        counts = list(kill_repeatedly(server, n_kills, n_clients, n_chars))
    print(f"lost after {n_kills} kills: {sorted(count.lost for count in counts)}")
    assert len(counts) >= n_kills
    assert max(count.lost_of_prompt for count in counts) <= BLOCK_TOKENS, counts
    assert max(count.lost for count in counts) < 2 * BLOCK_TOKENS, counts
