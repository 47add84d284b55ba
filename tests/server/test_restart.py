"""Conversations survive kill -9 of a real server."""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest
from mlx_lm.tokenizer_utils import load as load_tokenizer

from tests.support import (
    Message,
    ServerProcess,
    StartServer,
    make_tiny_model,
    make_zoo_model,
    n_not_sent,
    synthetic_text,
    wait_until,
)
from tests.support.lock_holder import lock_holder

from .stored import block_files, wait_for_commit, wait_for_reply

SYSTEM: Message = {"role": "system", "content": synthetic_text(150, seed=99)}


class Talk:
    """A conversation that sends its replies back."""

    def __init__(self, session: str, store: Path) -> None:
        self.session = session
        self.store = store
        self.messages: list[Message] = [SYSTEM]
        self.replies: list[str] = []
        self.cached: list[int] = []
        self.totals: list[int] = []

    def turn(self, server: ServerProcess, question: str, max_tokens: int = 40) -> None:
        self.messages.append({"role": "user", "content": question})
        reply = server.chat(self.messages, self.session, max_tokens=max_tokens, temperature=0.0)
        self.messages.append({"role": "assistant", "content": reply.text})
        self.replies.append(reply.text)
        self.cached.append(reply.cached_tokens)
        self.totals.append(reply.prompt_tokens + reply.completion_tokens)
        wait_for_commit(self.store, self.session, self.totals[-1])
        wait_for_reply(server)


@pytest.fixture(scope="module")
def server(started: StartServer, tiny_model: Path) -> ServerProcess:
    """The server of all tests that need no options."""
    return started.with_plugin(tiny_model)


@pytest.mark.parametrize("n_turns", [3, pytest.param(6, marks=pytest.mark.slow)])
def test_kills_between_turns_change_no_reply_and_no_block(
    tiny_model: Path, tmp_path: Path, n_turns: int
) -> None:
    """Replies, reuse and block files equal those of an uninterrupted conversation."""
    questions = [f"{n}. {synthetic_text(100, seed=n)}" for n in range(n_turns)]
    talks = {}
    for name in ("uninterrupted", "killed", "crowded"):
        store = tmp_path / name
        plugin = (
            "--plugin",
            "kvpersist",
            "--kvpersist-dir",
            str(store),
        )
        with ServerProcess(tiny_model, *plugin, log_path=tmp_path / f"{name}.log") as server:
            talk = talks[name] = Talk("main", store)
            for n, question in enumerate(questions):
                if name == "killed" and n > 0:
                    server.restart(kill=True)
                if name == "crowded":
                    with Crowd(server, seed=n):
                        talk.turn(server, question)
                else:
                    talk.turn(server, question)
    for name in ("killed", "crowded"):
        assert talks[name].replies == talks["uninterrupted"].replies, name
        assert talks[name].cached == talks["uninterrupted"].cached, name
    assert len(set(talks["killed"].replies)) == n_turns
    # Each turn reuses the prompt and the reply of the previous turn.
    for before, cached in zip(talks["killed"].totals, talks["killed"].cached[1:], strict=False):
        assert cached >= before - 1
    whole, killed = block_files(tmp_path / "uninterrupted"), block_files(tmp_path / "killed")
    assert len(whole) >= 3
    assert killed == whole


class Crowd:
    """Three other conversations that generate replies during the `with` block."""

    def __init__(self, server: ServerProcess, seed: int) -> None:
        self._server = server
        self._seed = seed
        self._stop = threading.Event()
        self._started = threading.Barrier(4)
        self._threads = [threading.Thread(target=self._talk, args=(n,)) for n in range(3)]
        self.n_replies = 0

    def __enter__(self) -> Crowd:
        for thread in self._threads:
            thread.start()
        self._started.wait()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        if error[0] is None:
            assert self.n_replies >= 3

    def _talk(self, n: int) -> None:
        self._started.wait()
        while True:
            text = synthetic_text(40 + 70 * n, seed=1000 * self._seed + n)
            self._server.chat(
                [{"role": "user", "content": f"{n} {text}"}], f"other-{n}", max_tokens=25
            )
            self.n_replies += 1
            if self._stop.is_set():
                return


def test_sampled_replies_are_reused(start_server: StartServer, models_dir: Path) -> None:
    """At temperature 1, tokenizing a reply's text almost never gives its ids."""
    model = make_tiny_model(models_dir / "any-bytes", whole_characters=False)
    tokenizer = load_tokenizer(model)
    server = start_server.with_plugin(model)
    talk: list[Message] = [SYSTEM]
    before = 0
    for n in range(4):
        talk.append({"role": "user", "content": f"{n}. Grüße 🎉"})
        reply = server.chat(talk, "sampled", max_tokens=50, temperature=1.0, logprobs=True)
        assert reply.cached_tokens >= before - 1, f"turn {n}"
        talk.append({"role": "assistant", "content": reply.text})
        before = reply.prompt_tokens + reply.completion_tokens - n_not_sent(tokenizer, reply.ids)
        if n == 1:
            wait_for_reply(server)
            server.restart(kill=True)


def test_header_and_log_say_what_was_reused(start_server: StartServer, tiny_model: Path) -> None:
    server = start_server.with_plugin(tiny_model)
    talk: list[Message] = [SYSTEM, {"role": "user", "content": "One?"}]
    first = server.chat(talk, "s", max_tokens=8)
    assert first.kvpersist["outcome"] == "MISS"
    assert first.cached_tokens == int(first.kvpersist["reused"]) == 0
    total = first.prompt_tokens + first.completion_tokens
    talk += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "Two?"}]
    hot = server.chat(talk, "s", stream=True, max_tokens=8)
    assert (hot.kvpersist["outcome"], hot.kvpersist["tier"]) == ("EXTEND", "ram")
    assert hot.cached_tokens == int(hot.kvpersist["reused"]) == total
    wait_for_commit(start_server.store, "s", hot.prompt_tokens + hot.completion_tokens)
    server.restart(kill=True)
    warm = server.chat(talk, "s", max_tokens=8)
    assert (warm.kvpersist["outcome"], warm.kvpersist["tier"]) == ("EXACT", "disk")
    assert warm.text == hot.text
    assert int(warm.kvpersist["restored"]) == warm.cached_tokens == warm.prompt_tokens - 1
    assert float(warm.kvpersist["restore_ms"]) > 0
    anonymous = server.chat(talk)
    assert anonymous.cached_tokens == warm.cached_tokens
    edited: list[Message] = [SYSTEM, {"role": "user", "content": "Other?"}]
    diverged = server.chat(edited)
    assert diverged.kvpersist["outcome"] == "DIVERGE"
    assert 0 < diverged.cached_tokens < diverged.prompt_tokens
    log = server.log
    sentences = re.findall(r"kvpersist: (.*) \(kvp-\w+\)$", log, re.MULTILINE)
    assert len(sentences) == 5
    sentences = sentences[2:]  # sentences since the restart
    assert re.fullmatch(
        rf"reused {warm.cached_tokens:,} of {warm.prompt_tokens:,} tokens from disk in \d+ ms, "
        '1 computed, session "s"',
        sentences[0],
    )
    assert sentences[1].startswith(f"reused {anonymous.cached_tokens:,} of")
    assert "from RAM, " in sentences[1] and "session" not in sentences[1]
    assert "computed (the prompt diverges from the stored text)" in sentences[2]


def test_start_logs_model_precision_and_folder(start_server: StartServer, tiny_model: Path) -> None:
    larger_than_the_machine = "--kvpersist-ram", "900T", "--kvpersist-min-free", "900T"
    server = start_server.with_plugin(tiny_model, *larger_than_the_machine)
    server.chat([SYSTEM, {"role": "user", "content": "One?"}])
    (line,) = (line for line in server.log.splitlines() if "a token, keys" in line)
    assert str(tiny_model) in line
    assert re.search(
        r": \d[\d.]* \w+ a token, keys 8 bits, values 4, rotated \(\d\.\d bits on average with",
        line,
    )
    assert "of the unquantized size; replies in batches, " in line
    assert "attention: prefill " in line
    (line,) = (line for line in server.log.splitlines() if "conversations in" in line)
    assert f"{start_server.store} (" in line and "and up to " in line and " of RAM" in line
    assert "TiB of RAM" not in line  # the pool gets no more than the account of memory
    assert "less than the 900.0 TiB of --kvpersist-min-free, so nothing new is stored" in line


def test_stocks_prompt_cache_is_not_logged(
    server: ServerProcess,
) -> None:
    for _ in range(2):
        reply = server.chat([SYSTEM, {"role": "user", "content": "Twice?"}])
    assert f"kvpersist: reused {reply.cached_tokens:,} of" in server.log
    assert "Prompt Cache:" not in server.log


def test_server_starts_while_another_process_has_the_lock(
    start_server: StartServer, tiny_model: Path
) -> None:
    """Stored turns are used at once; new turns are written after the other process ends."""
    server, talk = start_server.with_plugin(tiny_model), Talk("main", start_server.store)
    talk.turn(server, "One?")
    with lock_holder(start_server.store) as holder:
        server.restart(kill=True)
        talk.messages.append({"role": "user", "content": "Two?"})
        reply = server.chat(talk.messages, talk.session, max_tokens=9, temperature=0.0)
        assert reply.cached_tokens > 0
        wait_until(lambda: f"is being changed by process {holder.pid} (" in server.log, "a line")
    wait_for_commit(talk.store, talk.session, reply.prompt_tokens + reply.completion_tokens)


def test_isolated_sessions_share_no_blocks(start_server: StartServer, tiny_model: Path) -> None:
    server = start_server.with_plugin(tiny_model, "--kvpersist-isolation", "session")
    talk: list[Message] = [SYSTEM, {"role": "user", "content": "One?"}]
    assert server.chat(talk, "a").cached_tokens == 0
    assert server.chat(talk, "b").cached_tokens == 0
    assert server.chat(talk).cached_tokens == 0
    again = server.chat(talk, "a")
    assert again.cached_tokens == again.prompt_tokens - 1


def test_requests_with_a_seed_are_stored_and_reused(server: ServerProcess) -> None:
    """The server runs requests with a seed one at a time."""
    talk: list[Message] = [{"role": "user", "content": synthetic_text(150, seed=98)}]
    cold = server.chat(talk, "s", seed=3, temperature=1.0)
    again = server.chat(talk, "s", seed=3, temperature=1.0)
    assert again.text == cold.text
    assert (cold.cached_tokens, again.cached_tokens) == (0, cold.prompt_tokens - 1)
    assert again.kvpersist["outcome"] == "EXACT"


def test_text_completions_are_reused(server: ServerProcess) -> None:
    first = server.complete("Once upon a time", max_tokens=10)
    more = server.complete("Once upon a time" + first.text + " and then", max_tokens=10)
    assert more.cached_tokens >= first.prompt_tokens


def test_unsupported_model_is_served_as_stock(start_server: StartServer, tmp_path: Path) -> None:
    pytest.importorskip("mlx_lm.models.deepseek_v41", reason="newer than this mlx-lm")
    model = make_zoo_model(tmp_path / "model", "deepseek_v41")
    stock = start_server(model)
    talk: list[Message] = [{"role": "user", "content": synthetic_text(30)}]
    expected = stock.chat(talk)
    stock.stop()
    server = start_server.with_plugin(model)
    reply = server.chat(talk)
    assert reply.text == expected.text
    assert reply.kvpersist["outcome"] == "STOCK"
    server.chat(talk)
    assert server.log.count("served as stock does, nothing is kept: ") == 1
