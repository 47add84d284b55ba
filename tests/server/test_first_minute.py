"""A server stores conversations from its first request on, with the default options.

No test here waits between a start and its first request.
"""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import load

from mlx_lm_kvpersist.api.admin import PAGE_PATH, SPEC_PATH
from mlx_lm_kvpersist.cache.blocks import BLOCK_TOKENS
from mlx_lm_kvpersist.units import show_bytes
from tests.support import (
    Message,
    Reply,
    ServerProcess,
    StartServer,
    make_tiny_model,
    make_zoo_model,
    n_not_sent,
    synthetic_text,
    wait_until,
)
from tests.support.lock_holder import lock_holder

from .lora import make_adapter
from .stored import wait_for_commit, wait_for_reply

N_START_LINES = 8
"""The most log lines of the plugin at a start."""
N_REPLY = 24
"""The tokens of each reply."""


class Talk:
    """A conversation of long questions; it sends back each reply, or `answer` instead."""

    def __init__(
        self,
        session: str,
        seed: int = 0,
        model: Path | None = None,
        answer: str = "",
        **params: Any,
    ) -> None:
        self.session = session
        self.replies: list[Reply] = []
        self._answer = answer
        self._seed = seed
        self._params = params if model is None else {**params, "model": str(model)}
        system = f"{session} {synthetic_text(500, seed=seed)}"
        self._messages: list[Message] = [{"role": "system", "content": system}]

    def turn(self, server: ServerProcess) -> Reply:
        question = synthetic_text(600, seed=10 * self._seed + len(self.replies))
        self._messages.append({"role": "user", "content": question})
        reply = server.chat(
            self._messages, self.session, max_tokens=N_REPLY, temperature=0.0, **self._params
        )
        self._messages.append({"role": "assistant", "content": self._answer or reply.text})
        self.replies.append(reply)
        return reply

    @property
    def n_tokens(self) -> int:
        """The tokens of the last prompt and its reply."""
        return self.replies[-1].prompt_tokens + self.replies[-1].completion_tokens

    def lost(self) -> int:
        """Return how many tokens of the previous turn the last turn computed again."""
        before, last = self.replies[-2:]
        return before.prompt_tokens + before.completion_tokens - last.cached_tokens


def started_on(
    start_server: StartServer, model: Path, store: Path, *extra: str, **options: Any
) -> ServerProcess:
    """Start a server with the plugin's default options; it has served only /health."""
    plugin = ("--plugin", "kvpersist", "--kvpersist-dir", str(store))
    return start_server(model, *plugin, *extra, **options)


def wait_until_written(server: ServerProcess, store: Path, talk: Talk) -> None:
    """Wait until the last turn and the ids of its reply are on disk."""
    wait_for_commit(store, talk.session, talk.n_tokens)
    wait_for_reply(server)


def test_each_turn_reuses_at_least_as_much_as_stock(
    start_server: StartServer, tiny_model: Path, tmp_path: Path
) -> None:
    server = started_on(start_server, tiny_model, tmp_path / "store")
    stock = start_server(tiny_model)
    ours, stocks = Talk("talk"), Talk("talk")
    outcomes = [ours.turn(server).kvpersist["outcome"]]
    stocks.turn(stock)
    for _ in range(3):
        outcomes.append(ours.turn(server).kvpersist["outcome"])
        stocks.turn(stock)
        assert stocks.replies[-1].cached_tokens > 0
        assert ours.lost() <= stocks.lost()
    assert outcomes == ["MISS", "EXTEND", "EXTEND", "EXTEND"]


@pytest.mark.parametrize("moment", ["at the last byte", "when the turn is written"])
def test_early_and_late_kills_lose_at_most_two_blocks(
    start_server: StartServer, tiny_model: Path, tmp_path: Path, moment: str
) -> None:
    """A kill at the last byte loses at most the last block of the prompt and of the reply."""
    store = tmp_path / "store"
    server = started_on(start_server, tiny_model, store)
    talk = Talk("talk")
    for _ in range(2):  # right after the start, and later
        for _ in range(2):
            talk.turn(server)
        if moment == "when the turn is written":
            wait_until_written(server, store, talk)
        killed = talk.replies[-1]
        server.restart(kill=True)
        reused = talk.turn(server).cached_tokens
        if moment == "when the turn is written":
            assert talk.lost() <= 1
        else:
            assert killed.prompt_tokens - reused <= BLOCK_TOKENS
            assert talk.lost() <= 2 * BLOCK_TOKENS


def test_sigterm_after_the_first_turns_keeps_them(
    start_server: StartServer, tiny_model: Path, tmp_path: Path
) -> None:
    """SIGTERM comes as soon as four concurrent clients have their replies."""
    server = started_on(start_server, tiny_model, tmp_path / "store")
    talks = [Talk(f"client {n}", seed=n) for n in range(4)]
    with ThreadPoolExecutor(len(talks)) as pool:
        list(pool.map(lambda talk: talk.turn(server), talks))
    server.restart()
    for talk in talks:
        assert talk.turn(server).kvpersist["outcome"] == "EXTEND"
        assert talk.lost() <= 1


@pytest.mark.parametrize("n_models", [2, 3])
def test_alternating_models_keep_their_conversations(
    start_server: StartServer, tiny_model: Path, other_model: Path, tmp_path: Path, n_models: int
) -> None:
    """Each turn loads another model than the turn before."""
    third = make_zoo_model(tmp_path / "third", "qwen3") if n_models == 3 else None
    models = [model for model in (tiny_model, other_model, third) if model is not None]
    server = started_on(start_server, tiny_model, tmp_path / "store")
    talks = [Talk("talk", model=model) for model in models]
    for turn in range(4):
        for talk in talks:
            reply = talk.turn(server)
            assert reply.kvpersist["outcome"] == ("MISS" if turn == 0 else "EXTEND")
            if turn:
                assert talk.lost() <= 1
        if turn == 2:
            server.restart()


@pytest.mark.parametrize("bits", ["default", "16"])
def test_model_with_custom_code_is_cached_and_replies_as_stock(
    start_server: StartServer, tmp_path: Path, bits: str
) -> None:
    """The model has a known architecture's name, but unknown code.

    In full precision its replies are equal to stock's.
    """
    model = make_tiny_model(tmp_path / "model", config={"model_file": "own.py"})
    (model / "own.py").write_text(OWN_CODE, encoding="utf-8")
    precision = () if bits == "default" else ("--kvpersist-kv-bits", bits)
    trusted = ("--trust-remote-code", *precision)
    server = started_on(start_server, model, tmp_path / "store", *trusted)
    # For a returned reply, stock tokenizes the text, but our server uses the generated ids.
    talks = [Talk(f"client {n}", seed=n, answer="It is so.") for n in range(3)]
    with ThreadPoolExecutor(len(talks)) as pool:
        for turn in range(3):
            list(pool.map(lambda talk: talk.turn(server), talks))
            if turn == 1:
                server.restart()  # the second start
            if turn:
                assert all(talk.lost() <= N_REPLY + 1 for talk in talks)
    fact_lines = [
        line for line in own_lines(server.log) if re.search("no facts|unknown arch", line)
    ]
    assert len(fact_lines) == 2, "one line for each start"
    if bits == "16":
        stock = start_server(model, "--trust-remote-code")
        for n, talk in enumerate(talks):
            expected = Talk(talk.session, seed=n, answer="It is so.")
            texts = [expected.turn(stock).text for _ in talk.replies]
            assert [reply.text for reply in talk.replies] == texts


OWN_CODE = """
from mlx_lm.models import llama

ModelArgs = llama.ModelArgs


class Model(llama.Model):
    pass
"""


def test_start_logs_precision_folder_and_addresses_in_few_lines(
    start_server: StartServer, tiny_model: Path, tmp_path: Path
) -> None:
    """Each later turn adds at most one line."""
    store = tmp_path / "store"
    server = started_on(start_server, tiny_model, store)
    spec = json.loads(server.request("GET", SPEC_PATH)[2])
    lines = own_lines(server.log)
    assert 0 < len(lines) <= N_START_LINES
    text = "\n".join(lines)
    assert re.search(r"keys 8 bits, values 4", text)
    assert show_bytes(spec["bytes_per_token"]) in text
    assert str(store) in text and "of RAM" in text
    address = f"http://127.0.0.1:{server.port}"
    assert f"{address}/v1" in text and f"{address}{PAGE_PATH}" in text
    talk = Talk("talk")
    for _ in range(2):
        talk.turn(server)
    assert len(own_lines(server.log)) <= len(lines) + 2


def own_lines(log: str) -> list[str]:
    """Return the lines of a log that the plugin wrote."""
    return [line for line in log.splitlines() if "kvpersist: " in line]


@pytest.fixture(scope="module")
def other_model(models_dir: Path) -> Path:
    """The tiny model with other weights."""
    return make_tiny_model(models_dir / "first-minute-other", seed=7)


def test_start_does_not_wait_for_the_lock_of_the_store(
    start_server: StartServer, tiny_model: Path, tmp_path: Path
) -> None:
    """The log names the process that has the lock, and requests are served and stored."""
    store = tmp_path / "store"
    started_on(start_server, tiny_model, store).terminate()
    talk = Talk("talk")
    with lock_holder(store):
        server = started_on(start_server, tiny_model, store)
        talk.turn(server)
        talk.turn(server)
        assert talk.lost() <= 1
        wait_until(lambda: "is being changed by process" in server.log, "the lock's holder")
    wait_until_written(server, store, talk)
    server.restart(kill=True)
    talk.turn(server)
    assert talk.lost() <= 1


def test_adapter_added_at_a_later_start_reuses_only_its_own_blocks(
    start_server: StartServer, tiny_model: Path, tmp_path: Path
) -> None:
    """The first request with the adapter reuses nothing; the plain model's conversation is kept."""
    store = tmp_path / "store"
    adapted = "--adapter-path", str(make_adapter(tmp_path / "adapter", tiny_model))
    plain, other = Talk("talk"), Talk("talk", logprobs=True)
    server = started_on(start_server, tiny_model, store)
    plain.turn(server)
    server.terminate()
    changed = started_on(start_server, tiny_model, store, *adapted)
    assert other.turn(changed).kvpersist["reused"] == "0"
    assert other.replies[0].text != plain.replies[0].text
    other.turn(changed)
    assert other.lost() <= 1 + n_not_sent(load(tiny_model), other.replies[0].ids)
    changed.terminate()
    server.restart()
    plain.turn(server)
    assert plain.lost() <= 1
