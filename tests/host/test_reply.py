"""Clients that leave are noticed, whether or not anything is being written to them."""

from __future__ import annotations

import socket
from types import SimpleNamespace

from mlx_lm_kvpersist.host.reply import OpenRequests
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
