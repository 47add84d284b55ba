"""Two servers and four clients share a folder whose budget is far too small."""

from __future__ import annotations

import math
import os
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support import Message, Reply, ServerProcess, make_tiny_model, synthetic_text

MIB = 1 << 20
N_CLIENTS = 4
N_TURNS = 4
TOLERANCE = 0.1
"""For log probabilities. KV of other tokens changes them by more than 1.

Other chunks of a prompt change them by up to 0.025, even without a store: another order of
summation moves a few values to the next quantization step.
"""
N_HEADER_BYTES = 16 * 1024
"""An upper bound of a block file's header."""


@dataclass(frozen=True)
class Setting:
    """A model and a budget of 30 to 50 of its blocks."""

    n_layers: int
    n_kv_heads: int
    head_dim: int
    budget: int

    def make_model(self, folder: Path) -> Path:
        return make_tiny_model(
            folder,
            n_layers=self.n_layers,
            n_heads=self.n_kv_heads,
            n_kv_heads=self.n_kv_heads,
            head_dim=self.head_dim,
            hidden_size=64,
        )

    @property
    def file_bytes(self) -> int:
        """A block file's size: 8-bit keys, 4-bit values, 4-byte scales and biases per 64."""
        head_bytes = self.head_dim * 3 // 2 + 2 * 2 * 4 * (self.head_dim // 64)
        return 256 * self.n_layers * self.n_kv_heads * head_bytes + N_HEADER_BYTES


SMALL = Setting(n_layers=2, n_kv_heads=4, head_dim=64, budget=7 * MIB)
LARGE = Setting(n_layers=4, n_kv_heads=8, head_dim=128, budget=90 * MIB)


@dataclass
class Exchange:
    """A request and its reply."""

    messages: list[Message]
    tokens: list[dict[int, float]]
    prompt_tokens: int
    cached_tokens: int


@dataclass
class Load:
    """Clients that talk to servers, and the folder's size during that time."""

    servers: list[ServerProcess]
    store: Path
    n_exchanges: int
    exchanges: list[Exchange] = field(default_factory=list)
    failures: list[BaseException] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)

    def run(self) -> None:
        clients = [threading.Thread(target=self._talk, args=(n,)) for n in range(N_CLIENTS)]
        for client in clients:
            client.start()
        while any(client.is_alive() for client in clients):
            self.sizes.append(folder_bytes(self.store))
            time.sleep(0.05)
        if self.failures:
            raise self.failures[0]

    @property
    def is_done(self) -> bool:
        return len(self.exchanges) >= self.n_exchanges or bool(self.failures)

    def _talk(self, client: int) -> None:
        try:
            n = 0
            while not self.is_done:
                self._converse(client, n)
                n += 1
        except BaseException as error:
            self.failures.append(error)

    def _converse(self, client: int, n: int) -> None:
        """Have a conversation whose turns alternate between the servers."""
        # Clients 0 and 1 have the same conversations, and return to the second-last one.
        owner = client // 2
        n = n - 2 if n % 3 == 2 else n
        messages: list[Message] = [{"role": "system", "content": synthetic_text(500, seed=owner)}]
        for turn in range(N_TURNS):
            if self.is_done:
                return
            # Each digit is a token, so prompts diverge at a token boundary, and the cold server
            # gets the same ids.
            number = "\t".join(f"{owner}{n:03}{turn}")
            text = f"{number}\t{synthetic_text(250, seed=100 * n + turn)}"
            messages.append({"role": "user", "content": text})
            server = self.servers[(client + turn) % 2]
            reply = chat(server, messages, session=f"{owner}-{n}")
            self.exchanges.append(
                Exchange(list(messages), tokens_of(reply), reply.prompt_tokens, reply.cached_tokens)
            )
            # The reply is not sent back: the cold server would tokenize it differently.
            assistant = "\t" + synthetic_text(80, seed=turn)
            messages.append({"role": "assistant", "content": assistant})


def chat(server: ServerProcess, messages: list[Message], **options: Any) -> Reply:
    return server.chat(
        messages, max_tokens=6, temperature=0.0, logprobs=True, top_logprobs=10, **options
    )


def folder_bytes(folder: Path) -> int:
    """Return the size of all files."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(where, name)).st_size
            except FileNotFoundError:
                continue
    return total


def check_replies(server: ServerProcess, exchanges: list[Exchange]) -> None:
    """Compare each reply with a cold one: each request is repeated in a new namespace."""
    wrong = []
    for n, exchange in enumerate(exchanges):
        reply = chat(server, exchange.messages, headers={"X-KVPersist-Namespace": str(n)})
        assert reply.cached_tokens == 0
        off_by = difference(exchange.tokens, tokens_of(reply))
        if off_by > TOLERANCE or reply.prompt_tokens != exchange.prompt_tokens:
            wrong.append((n, len(exchange.messages), exchange.cached_tokens, off_by))
    assert not wrong, f"{len(wrong)} of {len(exchanges)} replies differ: {wrong[:5]}"


def tokens_of(reply: Reply) -> list[dict[int, float]]:
    """Return the log probabilities of the most probable tokens at each position of a reply."""
    return [
        {entry["id"]: entry["logprob"] for entry in token["top_logprobs"]}
        for token in reply.raw["choices"][0]["logprobs"]["content"]
    ]


def difference(first: list[dict[int, float]], second: list[dict[int, float]]) -> float:
    """Return the largest difference of log probabilities up to the divergence of two replies.

    The order of summation decides between almost equally probable tokens.
    """
    worst = 0.0
    for here, there in zip(first, second, strict=True):
        best, best_there = max(here, key=here.__getitem__), max(there, key=there.__getitem__)
        if best not in there or best_there not in here:
            return math.inf
        worst = max(worst, abs(here[best] - there[best]), abs(here[best_there] - there[best_there]))
        if best != best_there:
            break
    return worst


def attack(setting: Setting, folder: Path, n_exchanges: int, n_checked: int) -> None:
    store, budget = folder / "store", setting.budget
    model = setting.make_model(folder / "model")
    plugin = (
        "--plugin",
        "kvpersist",
        "--kvpersist-dir",
        str(store),
        "--kvpersist-min-free",
        "0",
    )
    # Little RAM, so that the servers must read from disk.
    limits = ("--kvpersist-disk", str(budget), "--kvpersist-ram", "1M")
    with ExitStack() as stack:
        servers = [
            stack.enter_context(
                ServerProcess(model, *plugin, *limits, log_path=folder / f"{n}.log")
            )
            for n in range(2)
        ]
        load = Load(servers, store, n_exchanges)
        load.run()
        logs = [server.log for server in servers]
    peak = max(load.sizes)
    assert peak <= budget + setting.file_bytes, f"{peak / MIB:.1f} MiB of {budget / MIB:.1f}"
    # The budget was almost used up, and many prompts were still restored from disk.
    assert peak > 0.7 * budget
    assert sum(log.count("disk in ") for log in logs) > len(load.exchanges) // 4
    for log in logs:
        bad = [line for line in log.splitlines() if "ERROR" in line or "Traceback" in line]
        assert not bad, bad[:5]
        assert "goes to quarantine" not in log
    cold = (
        "--plugin",
        "kvpersist",
        "--kvpersist-dir",
        str(folder / "cold"),
    )
    step = max(1, len(load.exchanges) // n_checked)
    with ServerProcess(model, *cold, log_path=folder / "cold.log") as server:
        check_replies(server, load.exchanges[::step])


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("setting", "n_exchanges", "n_checked"),
    [
        (SMALL, 50, 8),
        pytest.param(SMALL, 400, 30, marks=pytest.mark.slow),
        pytest.param(LARGE, 200, 40, marks=pytest.mark.slow),
    ],
    ids=["small", "small and long", "large"],
)
def test_two_servers_keep_a_small_budget_and_give_correct_replies(
    tmp_path: Path, setting: Setting, n_exchanges: int, n_checked: int
) -> None:
    attack(setting, tmp_path, n_exchanges, n_checked)
