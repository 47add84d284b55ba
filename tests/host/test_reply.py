"""Clients that leave are noticed, whether or not anything is being written to them."""

from __future__ import annotations

import socket
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_lm_kvpersist.errors import ClientGone
from mlx_lm_kvpersist.host.reply import OpenRequests, ReplyQueue
from mlx_lm_kvpersist.host.response_generator import PluginResponseGenerator
from tests.support.waiting import wait_until


def test_who_left_is_marked_and_forgotten_and_the_watch_ends() -> None:
    ours, theirs = socket.socketpair()
    requests = OpenRequests()
    left, stays = SimpleNamespace(connection=ours), SimpleNamespace()
    requests.begin(left)
    requests.begin(stays)
    theirs.close()
    wait_until(lambda: len(requests) == 1, "the one that left to be forgotten")
    assert left.client_gone and not hasattr(stays, "client_gone")
    requests.end(stays)
    wait_until(lambda: not requests._is_watched, "the end of the watch")
    for _ in range(2):
        requests.begin(again := SimpleNamespace(connection=ours))
        wait_until(lambda: len(requests) == 0, "the next that left to be forgotten")
        assert again.client_gone
        ours.close()  # then its own thread has ended


class Stock:
    """Computes a prompt in one piece, and tells how far it is."""

    def _serve_single(self, request: Any, *args: Any) -> None:
        reply, asked, _ = request
        reply.put(SimpleNamespace(_should_stop=False, stop=lambda: None))
        reply.put((1, 9))
        asked.client_gone = True
        reply.put((2, 9))
        raise AssertionError("the whole prompt was computed for nobody")


def test_a_prompt_in_one_piece_ends_where_its_client_has_left() -> None:
    generator: Any = object.__new__(type("Patched", (PluginResponseGenerator, Stock), {}))
    queue: Queue[Any] = Queue()
    request = SimpleNamespace(client_gone=False)
    with pytest.raises(ClientGone):
        generator._serve_single((ReplyQueue(queue, request), request, None))
    assert [type(queue.get()) for _ in range(queue.qsize())][1:] == [tuple, ClientGone]
