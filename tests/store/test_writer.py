"""The writer's rests: how long they are, and what ends them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mlx_lm_kvpersist.store.block_store import BlockStore, Turn
from mlx_lm_kvpersist.store.writer import REST_FACTOR, Writer
from tests.support import wait_until

from .conftest import ROOT, arrays_of, chain

TURN = Turn(ROOT, ())
FOR_EVER_S = 1000.0


@pytest.fixture
def writer() -> Iterator[Writer]:
    writer = Writer(max_bytes=100)
    yield writer
    writer.close(10)


def submit(writer: Writer, n_bytes: int) -> None:
    writer.submit_turn(TURN, save=lambda: None, abandon=lambda: None, n_bytes=n_bytes)


def resting(writer: Writer, worked_s: float = FOR_EVER_S) -> threading.Event:
    """Have the writer's thread rest; return what is set when it has done so."""
    ended = threading.Event()

    def run() -> None:
        writer.rest(worked_s)
        ended.set()

    writer.submit(run)
    return ended


def test_it_works_a_seventh_of_the_time_while_others_are_served(writer: Writer) -> None:
    writer.set_gentle(True)
    started = time.monotonic()
    assert resting(writer, 0.05).wait(10)
    assert time.monotonic() - started >= 0.05 * REST_FACTOR


def test_it_does_not_rest_when_nobody_is_served(writer: Writer) -> None:
    assert resting(writer).wait(10)


@pytest.mark.parametrize(
    "end",
    [
        lambda writer: writer.set_gentle(False),
        lambda writer: submit(writer, 51),
        lambda writer: writer.drain(),
        lambda writer: writer.close(10),
    ],
    ids=["nobody is served", "half full", "drained", "closed"],
)
def test_what_ends_a_rest(writer: Writer, end: Callable[[Writer], Any]) -> None:
    writer.set_gentle(True)
    ended = resting(writer)
    submit(writer, 50)
    assert not ended.wait(0.2)
    end(writer)
    assert ended.wait(10)


def test_a_turn_is_committed_after_its_rests(store: BlockStore) -> None:
    nodes = chain([1], [2], [3])
    store.drain()
    store.set_gentle(True)
    rests: list[float] = []
    may_go_on = threading.Event()

    def rest(worked_s: float) -> None:
        rests.append(worked_s)
        may_go_on.wait(10)

    store._writer.rest = rest  # type: ignore[method-assign]
    store.keep_turn(Turn(ROOT, tuple(nodes)), [(node, arrays_of(node)) for node in nodes])
    wait_until(lambda: len(rests) == 1, "the first rest")
    assert store.index.n_blocks() == 0
    may_go_on.set()
    store.drain()
    assert len(rests) == 3 and all(worked_s > 0 for worked_s in rests)
    assert store.index.n_blocks() == 3
