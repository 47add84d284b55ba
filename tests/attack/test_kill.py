"""After kill -9 at any moment, the store has all committed turns and nothing else."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from mlx_lm_kvpersist.store.block_store import BlockStore
from mlx_lm_kvpersist.store.encryption import Cipher
from mlx_lm_kvpersist.store.folder import PLAIN
from mlx_lm_kvpersist.store.index import Index
from tests.server.stored import block_files, wait_for_commit
from tests.support import (
    Message,
    ServerError,
    ServerProcess,
    synthetic_text,
    wait_until,
)

from . import tool_turns
from .turns import LIMITS, check_committed, keep_turn

TALKS = ("first", "second", "third")


class KilledStore:
    """A store whose writing process is killed repeatedly."""

    def __init__(self, folder: Path, key: str = "") -> None:
        self.key = key
        self.store = folder / "store"
        self.log = folder / "committed.log"
        self.log.touch()

    @property
    def lines(self) -> list[list[str]]:
        # A kill may cut the last line.
        whole = self.log.read_text().rpartition("\n")[0]
        return [line.split() for line in whole.splitlines()]

    @property
    def committed(self) -> dict[str, int]:
        return {name: int(n_tokens) for name, n_tokens in self.lines if name != "open"}

    @property
    def n_turns(self) -> int:
        return sum(name != "open" for name, _ in self.lines)

    def write_and_kill(self, seed: int, n_turns: int, n_lines: int, wait_s: float) -> None:
        """Run a process that writes; kill it `wait_s` after it has logged `n_lines` more lines."""
        n_before = len(self.lines)
        command = [sys.executable, "-m", "tests.attack.turns"]
        arguments = [str(self.store), str(self.log), str(seed), str(n_turns), self.key]
        process = subprocess.Popen([*command, *arguments], stderr=subprocess.PIPE)
        try:
            wait_until(
                lambda: len(self.lines) >= n_before + n_lines or process.poll() is not None,
                f"{n_lines} lines",
                60,
            )
            time.sleep(wait_s)
        finally:
            process.kill()
            _, errors = process.communicate()
        assert not errors, errors.decode()


def kill_and_check(folder: Path, n_turns: int, most_lines: int, key: str = "") -> None:
    """Kill processes until they have written `n_turns` turns, at least ten; check after each kill.

    A process is killed after a number of log lines, so a busy machine needs no more processes.
    """
    rng = random.Random(n_turns)
    killed = KilledStore(folder, key)
    encryption = Cipher(bytes.fromhex(key)) if key else PLAIN
    n_kills = 0
    while killed.n_turns < n_turns or n_kills < 10:
        # The first line says that the store is open. Every eighth kill may come before it.
        n_lines, longest_s = (rng.randint(1, most_lines), 0.05) if n_kills % 8 != 7 else (0, 0.25)
        killed.write_and_kill(n_kills, n_turns, n_lines, rng.uniform(0, longest_s))
        check_committed(killed.store, killed.committed, encryption=encryption)
        n_kills += 1


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("n_turns", "most_lines"),
    [(100, 8), *(pytest.param(*n, marks=pytest.mark.slow) for n in ((300, 20), (4_000, 60)))],
)
def test_store_is_consistent_after_kills_at_any_moment(
    tmp_path: Path, n_turns: int, most_lines: int
) -> None:
    kill_and_check(tmp_path, n_turns, most_lines)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_encrypted_store_is_consistent_after_kills_at_any_moment(tmp_path: Path) -> None:
    kill_and_check(tmp_path, 300, 20, key="5e" * 32)


def filled_store(folder: Path) -> dict[str, int]:
    """Write some turns; return the length of every session."""
    store = BlockStore(folder, LIMITS)
    lengths = {"anna": 230, "ben": 100, "carl": 33}
    for name, n_tokens in lengths.items():
        keep_turn(store, name, 0, n_tokens // 2)
        keep_turn(store, name, n_tokens // 2, n_tokens)
    store.close()
    return lengths


def remove_index(folder: Path) -> None:
    for path in folder.glob("index.sqlite*"):
        path.unlink()


def forget_replies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the check of remembered replies: only the removed index had them."""
    monkeypatch.setattr(BlockStore, "replies", _ids_of)


def _ids_of(store: BlockStore, root: bytes, keys: list[bytes]) -> dict[bytes, bytes]:
    return {key: store.index.chain(key)[-1][0].packed_ids for key in keys}


def test_missing_index_is_rebuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = filled_store(tmp_path)
    remove_index(tmp_path)
    forget_replies(monkeypatch)
    check_committed(tmp_path, lengths)


def test_empty_index_file_is_rebuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite reads a file of 0 bytes as a database without tables."""
    lengths = filled_store(tmp_path)
    (tmp_path / "index.sqlite").write_bytes(b"")
    forget_replies(monkeypatch)
    check_committed(tmp_path, lengths)


class Killer(BaseException):
    """Simulates SIGKILL at an exact call, which a real signal cannot hit."""


@pytest.mark.parametrize("n_calls", [0, 1, 7, 20, 21, 23])  # checkpoints come after 21 blocks
@pytest.mark.parametrize("method", ["add_blocks", "put_session"])
def test_store_is_consistent_after_a_kill_during_an_index_rebuild(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, n_calls: int
) -> None:
    lengths = filled_store(tmp_path)
    remove_index(tmp_path)
    stock: Callable[..., None] = getattr(Index, method)
    calls_left = [n_calls]

    def dying(self: Index, *args: Any) -> None:
        if calls_left[0] == 0:
            raise Killer
        calls_left[0] -= 1
        stock(self, *args)

    monkeypatch.setattr(Index, method, dying)
    try:
        BlockStore(tmp_path, LIMITS).close()
    except Killer:
        pass
    monkeypatch.setattr(Index, method, stock)
    forget_replies(monkeypatch)
    check_committed(tmp_path, lengths)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_server_replies_are_equal_with_and_without_kills(tiny_model: Path, tmp_path: Path) -> None:
    """The kills change no reply and no stored byte of three conversations of ten turns."""
    replies: dict[str, dict[str, list[str]]] = {}
    for name in ("uninterrupted", "killed"):
        store = tmp_path / name
        plugin = (
            "--plugin",
            "kvpersist",
            "--kvpersist-dir",
            str(store),
        )
        rng = random.Random(7)
        with ServerProcess(tiny_model, *plugin, log_path=tmp_path / f"{name}.log") as server:
            talks: dict[str, list[Message]] = {talk: [] for talk in TALKS}
            for turn in range(10):
                for talk, messages in talks.items():
                    question = f"{talk} {turn}. {synthetic_text(80, seed=turn)}"
                    messages.append({"role": "user", "content": question})
                    if name == "killed":
                        ask_and_kill(server, messages, talk, rng.uniform(0.0, 0.5))
                    reply = server.chat(messages, talk, max_tokens=30, temperature=0.0)
                    messages.append({"role": "assistant", "content": reply.text})
                    # The next kill must not come before this turn is committed.
                    wait_for_commit(store, talk, reply.prompt_tokens + reply.completion_tokens)
            replies[name] = {
                talk: [m["content"] for m in messages[1::2]] for talk, messages in talks.items()
            }
        assert "goes to quarantine" not in (tmp_path / f"{name}.log").read_text()
    assert replies["killed"] == replies["uninterrupted"]
    # A killed turn may leave additional files, but never different bytes.
    whole, killed = (block_files(tmp_path / name) for name in ("uninterrupted", "killed"))
    assert whole.items() <= killed.items()


def ask_and_kill(
    server: ServerProcess, messages: list[Message], session: str, wait_s: float
) -> None:
    """Send a request; kill the server after `wait_s`, with or without a reply; start it again."""

    def ask() -> None:
        try:
            server.chat(messages, session, max_tokens=30, temperature=0.0)
        except (OSError, ServerError, ValueError):
            pass  # the server was killed

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(wait_s)
    server.kill9()
    thread.join()
    server.start()


def kill_after(command: list[str], is_done: Callable[[], bool], rng: random.Random) -> None:
    """Run a program, and kill it shortly after `is_done` returns True."""
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    try:
        wait_until(lambda: is_done() or process.poll() is not None, "the program", 120)
        time.sleep(rng.uniform(0, 0.3))
    finally:
        process.kill()
        _, errors = process.communicate()
    assert not errors, errors.decode()


def at_least(log: Path, n_turns: int) -> bool:
    return len(tool_turns.lines(log)) >= n_turns


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("n_kills", [2, pytest.param(200, marks=pytest.mark.slow)])
def test_kill_costs_a_hybrid_model_at_most_the_allowed_loss(tmp_path: Path, n_kills: int) -> None:
    """Counts the tokens that are computed again after each kill during tool turns."""
    rng = random.Random(n_kills)
    log, store = tmp_path / "log", tmp_path / "store"
    log.touch()
    lost: list[int] = []
    at_most = may_lose = round(tool_turns.MAX_LOSS_S * tool_turns.TOKENS_PER_S)
    for _ in range(n_kills):
        n_before = len(tool_turns.lines(log))
        command = [sys.executable, "-m", "tests.attack.tool_turns", str(store), str(log)]
        kill_after(command, partial(at_least, log, n_before + rng.randint(1, 4)), rng)
        turns = tool_turns.lines(log)[n_before:]
        lost.append(turns[0]["of"] - turns[0]["reused"])
        # The kill may have come before the writer had written the process's last turn.
        assert lost[-1] <= may_lose + tool_turns.N_TOOL + tool_turns.N_REPLY
        # If this turn is also the process's last, its tokens may be lost again.
        may_lose = max(at_most, lost[-1] if len(turns) == 1 else 0)
    print(f"lost in {n_kills} kills: at most {max(lost)} tokens, {mean(lost):.0f} on average")
    with closing(tool_turns.model(tmp_path / "uninterrupted", 0.0)) as whole:
        uninterrupted: list[dict[str, Any]] = []
        for killed in tool_turns.lines(log):
            uninterrupted.append(tool_turns.turn(whole, uninterrupted))
            assert uninterrupted[-1]["reply"] == killed["reply"]
