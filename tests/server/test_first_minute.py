"""From the first moment on requests are served right, and what they computed is kept in the end.

At a first start what a model's caches can do is found out between requests.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mlx_lm_kvpersist.api.admin import REQUESTS_PATH, SPEC_PATH
from mlx_lm_kvpersist.api.page import SESSIONS_PATH
from tests.support import Message, Reply, ServerProcess, StartServer, synthetic_text, wait_until
from tests.support.lock_holder import lock_holder

from .lora import make_adapter
from .stored import wait_for_writer

AGAIN: list[Message] = 2 * [
    {"role": "assistant", "content": "It is so."},
    {"role": "user", "content": "Is it?"},
]
QUESTION: list[Message] = [{"role": "user", "content": synthetic_text(300)}]
TALKS: list[list[Message]] = [
    [{"role": "user", "content": synthetic_text(2000, seed=seed)}] for seed in range(3)
]
SENT: dict[str, Any] = {"max_tokens": 60, "temperature": 0.0}


def told(server: ServerProcess, path: str) -> Any:
    status, _, body = server.request("GET", path)
    assert status == 200
    return json.loads(body)


def wait_until_known(server: ServerProcess) -> None:
    wait_until(lambda: not told(server, SPEC_PATH)["examining"], "all of the model", 60)


def begun(
    start_server: StartServer, model: Path, store: Path, *extra: str, **how: Any
) -> ServerProcess:
    """Start a server; it answers, and does not know its model."""
    options = "--kvpersist-dir", str(store), "--kvpersist-attention", "auto", *extra
    return start_server.with_plugin(model, *options, examined=False, **how)


def test_a_conversation_from_the_first_moment_on_is_right_and_kept(
    start_server: StartServer, tiny_model: Path, tmp_path: Path
) -> None:
    stock = start_server(tiny_model)
    server = begun(start_server, tiny_model, tmp_path / "store", "--kvpersist-kv-bits", "16")
    talk, n_unknown = list(QUESTION), 0
    for turn in range(6):
        its, expected = (
            one.chat(talk, max_tokens=8, temperature=0.0, session="s") for one in (server, stock)
        )
        assert its.text == expected.text
        n_unknown += "reason=not-ready" in its.headers["x-kvpersist"]
        if turn == 0:
            assert n_unknown, "the first reply waits for what is found out"
            said = told(server, SESSIONS_PATH)
            assert said["examining"] is None or said["examining"].endswith(" of 4)")
            (record,) = told(server, REQUESTS_PATH)
            assert "the model is still being examined: " in record["sentence"]
        talk += [
            {"role": "assistant", "content": its.text},
            {"role": "user", "content": f"And number {turn}?"},
        ]
        if turn == 3:
            wait_until_known(server)
    assert n_unknown <= 4
    # The last turn that was held is there, so the first that was looked up went on from it.
    outcomes = [one["outcome"] for one in told(server, REQUESTS_PATH)[::-1]]
    assert outcomes[4:] == ["EXTEND", "EXTEND"]
    wait_for_writer(server)
    server.restart(kill=True)
    again = server.chat(talk, max_tokens=8, temperature=0.0, session="s")
    assert "outcome=EXTEND" in again.headers["x-kvpersist"]
    stages = [line.partition("nothing is kept yet: ")[2] for line in server.log.splitlines()]
    assert [stage[-8:] for stage in stages if stage] == [f"({n} of 4)" for n in range(1, 5)]


def test_an_end_in_the_middle_and_a_second_server_change_nothing(
    start_server: StartServer, tiny_model: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    server = begun(start_server, tiny_model, store)
    for pause_s in (0.0, 0.3, 0.8):
        time.sleep(pause_s)
        server.restart(kill=True)
    other = begun(start_server, tiny_model, store)
    first = server.chat(QUESTION, max_tokens=8, temperature=0.0)
    assert other.chat(QUESTION, max_tokens=8, temperature=0.0).text == first.text
    wait_until_known(server)
    wait_until_known(other)
    plans = [told(one, SPEC_PATH)["attention"] for one in (server, other)]
    for one in (server, other):
        wait_for_writer(one)
        one.restart(kill=True)
        assert told(one, SPEC_PATH)["examining"] is None
    assert told(server, SPEC_PATH)["attention"] == told(other, SPEC_PATH)["attention"]
    assert told(server, SPEC_PATH)["attention"] in plans


def test_a_start_does_not_wait_for_the_stores_lock(
    start_server: StartServer, tiny_model: Path, tmp_path: Path
) -> None:
    """It says who has it, within 5 s, and serves."""
    store = tmp_path / "store"
    begun(start_server, tiny_model, store).terminate()
    with lock_holder(store):
        server = begun(start_server, tiny_model, store)
        assert server.chat(QUESTION, max_tokens=4).text
        wait_until(lambda: "is being changed by process" in server.log, "who has the lock", 5.0)
        wait_until_known(server)
    wait_for_writer(server)
    server.restart(kill=True)
    assert told(server, SPEC_PATH)["examining"] is None


@pytest.mark.parametrize("fault", ["round_trip", "canary"])
def test_a_model_that_fails_is_served_as_stock_does(
    start_server: StartServer, tiny_model: Path, tmp_path: Path, fault: str
) -> None:
    """Nothing is stored of it, before and after."""
    stock = start_server(tiny_model)
    server = start_server.with_plugin(
        tiny_model,
        *("--kvpersist-dir", str(tmp_path / "store"), "--kvpersist-kv-bits", "16"),
        launcher=launcher(tmp_path, fault),
        examined=False,
    )
    talk = QUESTION
    expected = stock.chat(talk, max_tokens=8, temperature=0.0)
    assert server.chat(talk, max_tokens=8, temperature=0.0).text == expected.text
    wait_until(lambda: not told(server, SPEC_PATH)["kept"], "the refusal", 60)
    assert "served as stock does, nothing is kept" in server.log
    its = server.chat(talk, max_tokens=8, temperature=0.0)
    assert its.text == expected.text and "outcome=STOCK" in its.headers["x-kvpersist"]
    assert not list((tmp_path / "store").glob("blocks/*/*"))


@pytest.mark.parametrize(
    "change",
    [
        "an adapter",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("another device", "a refusal")),
    ],
)
def test_what_is_another_model_at_a_later_start_is_served_right_from_its_first_second(
    start_server: StartServer, tiny_model: Path, tmp_path: Path, change: str
) -> None:
    """And what was found and stored of the first is there when it comes back."""
    options, extra = ("--kvpersist-kv-bits", "16"), list[str]()
    store, sent = tmp_path / "store", dict[str, Any](max_tokens=8, temperature=0.0)
    if change == "an adapter":
        extra += ["--adapter-path", str(make_adapter(tmp_path / "adapter", tiny_model))]
    first = begun(start_server, tiny_model, store, *options)
    plain = first.chat(QUESTION, **sent).text
    wait_until_known(first)
    wait_for_writer(first)
    first.terminate()
    stock = start_server(tiny_model, *extra)
    talks = [[*QUESTION, *AGAIN[:n]] for n in (0, 2, 4)]
    expected = [stock.chat(talk, **sent).text for talk in talks]
    stock.terminate()
    assert (expected[0] != plain) == (change == "an adapter")
    program = launcher(tmp_path, *({change} & CHANGES.keys()))
    changed = begun(start_server, tiny_model, store, *options, *extra, launcher=program)

    def ask_all() -> list[Reply]:
        with ThreadPoolExecutor(3) as pool:
            return list(pool.map(lambda talk: changed.chat(talk, **sent), talks))

    for _ in range(2):
        assert [reply.text for reply in ask_all()] == expected
    wait_until(lambda: not told(changed, SPEC_PATH).get("examining"), "all of the model", 60)
    replies = ask_all()
    assert [reply.text for reply in replies] == expected
    outcome = "STOCK" if change == "a refusal" else "EXACT"
    assert {reply.kvpersist["outcome"] for reply in replies} == {outcome}
    assert changed.log.count("nothing is kept: ") == (change == "a refusal")
    assert ("nothing is kept yet" in changed.log) == (change != "a refusal")
    changed.terminate()
    again = begun(start_server, tiny_model, store, *options)
    assert told(again, SPEC_PATH)["examining"] is None
    reply = again.chat(QUESTION, **sent)
    assert (reply.text, reply.kvpersist["outcome"]) == (plain, "EXACT")


@pytest.mark.slow
@pytest.mark.parametrize("found", ["as expected", "no batches", "canary"])
def test_a_server_that_is_never_idle_gets_to_know_its_model(
    start_server: StartServer, tiny_model: Path, tmp_path: Path, found: str
) -> None:
    """Between the steps of the replies, all of which are right, and what they leave is kept."""
    server = start_server.with_plugin(
        tiny_model,
        *("--kvpersist-dir", str(tmp_path / "store"), "--kvpersist-kv-bits", "16"),
        launcher=launcher(tmp_path, "never idle", *({found} & CHANGES.keys())),
        examined=False,
    )
    first = server.chat(TALKS[0], **SENT).headers["x-kvpersist"]
    expected = [server.chat(talk, **SENT).text for talk in TALKS]
    with kept_busy(server) as replies:
        wait_until(lambda: not told(server, SPEC_PATH).get("examining"), "all of the model", 90)
        n_before = len(replies)
        wait_until(lambda: len(replies) > n_before + 9, "some replies", 60)
    outcomes = [reply.headers["x-kvpersist"] for _, reply in replies]
    assert all(reply.text == expected[number] for number, reply in replies)
    assert "not-ready" in first and "not-ready" not in outcomes[-1]
    if found == "canary":
        assert "outcome=STOCK" in outcomes[-1] and not told(server, SPEC_PATH)["kept"]
        return
    assert "outcome=EXACT" in outcomes[-1]
    assert told(server, SPEC_PATH)["batching"] == (
        "nothing" if found == "no batches" else "prompts and replies"
    )
    wait_for_writer(server)
    server.restart(kill=True)
    assert "outcome=EXACT" in server.chat(TALKS[0], session="0", **SENT).headers["x-kvpersist"]


@pytest.mark.slow
def test_a_server_that_is_never_idle_gets_another_precision_where_the_default_is_not_borne(
    start_server: StartServer, tiny_model: Path, tmp_path: Path
) -> None:
    """Each reply is wholly of the one precision or of the other, which is the model's own here."""
    stock = start_server(tiny_model)
    own = [stock.chat(talk, **SENT).text for talk in TALKS]
    stock.terminate()
    server = start_server(
        tiny_model,
        *("--plugin", "kvpersist", "--kvpersist-dir", str(tmp_path / "store")),
        launcher=launcher(tmp_path, "never idle", "a strict guard"),
        examined=False,
    )
    default = [server.chat(talk, **SENT).text for talk in TALKS]
    assert default != own
    with kept_busy(server) as replies:
        wait_until(lambda: "from now on: the default loses" in server.log, "the precision", 120)
        n_before = len(replies) + len(TALKS)
        wait_until(lambda: len(replies) > n_before + 9, "some replies", 60)
    assert all(reply.text in (default[number], own[number]) for number, reply in replies)
    assert all(reply.text == own[number] for number, reply in replies[n_before:])
    assert "outcome=EXACT" in replies[-1][1].headers["x-kvpersist"]
    assert "Traceback" not in server.log


@contextmanager
def kept_busy(server: ServerProcess) -> Iterator[list[tuple[int, Reply]]]:
    """Ask for `TALKS` all the time, at the same time; yield the replies, with their numbers."""
    is_over, replies = threading.Event(), list[tuple[int, Reply]]()

    def client(number: int) -> None:
        while not is_over.is_set():
            replies.append((number, server.chat(TALKS[number], session=str(number), **SENT)))

    with ThreadPoolExecutor(len(TALKS)) as pool:
        clients = [pool.submit(client, number) for number in range(len(TALKS))]
        try:
            yield replies
        finally:
            is_over.set()
        for one in clients:
            one.result()


def launcher(folder: Path, *changes: str) -> tuple[str]:
    """Return the program of a server in which lines of `CHANGES` were run."""
    path = folder / "launcher.py"
    lines = "import sys", "from mlx_lm_kvpersist import _startup", *map(CHANGES.get, changes)
    path.write_text("\n".join([*map(str, lines), "_startup.serve(sys.argv[1:])"]))
    return (str(path),)


CHANGES = {
    "round_trip": "from mlx_lm_kvpersist import round_trip; round_trip._NOISE = -1.0",
    "canary": "from mlx_lm_kvpersist.cache.blocks import canary\n"
    "canary.canary_difference = lambda *_: 1.0",
    "another device": "from mlx_lm_kvpersist.request import loading\n"
    "loading.device_key = lambda: 'another'",
    "a refusal": "from mlx_lm_kvpersist.cache.geometry import probe; probe.KINDS = {}",
    "no batches": "from mlx_lm_kvpersist.cache.geometry import probe\n"
    "probe._batching = lambda *_: (yield) or (False, False)",
    "a strict guard": "from mlx_lm_kvpersist.cache.measuring import guard\n"
    "guard.LIMIT_NATS, guard._FALLBACKS = 1e-12, guard._FALLBACKS[-1:]",
    "never idle": "from mlx_lm_kvpersist.request import idle\n"
    "idle.IdleWork.idle, idle.PATIENCE_S, idle._BUSY_SHARE = lambda *_: None, 1.0, 0.6",
}
