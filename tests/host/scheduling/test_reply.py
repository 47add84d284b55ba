"""Replies on their way to their clients, and clients that went away."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_lm_kvpersist.errors import ClientGone, DeviceFailed
from mlx_lm_kvpersist.host.answers import ClientRequest
from mlx_lm_kvpersist.host.scheduling.reply import (
    LAST_BYTES_S,
    OpenRequests,
    ReplyQueue,
)
from tests.support import wait_until


class Context:
    """What stock puts first into the queue of a reply."""

    _should_stop = False
    prompt: Sequence[int] = ()

    def stop(self) -> None:
        self._should_stop = True


def reply_of(request: Any) -> tuple[ReplyQueue, Context, Queue[Any]]:
    queue: Queue[Any] = Queue()
    reply, context = ReplyQueue(queue, request), Context()
    reply.put(context)
    return reply, context, queue


def taken(queue: Queue[Any]) -> list[Any]:
    return [queue.get() for _ in range(queue.qsize())]


@pytest.mark.parametrize("end", [None, ValueError("bad luck")])
def test_a_reply_ends_once(end: Any) -> None:
    reply, context, queue = reply_of(SimpleNamespace(client_gone=False))
    for item in ((1, 9), "token", end, "late", None):
        reply.put(item)
    reply.fail(ValueError("too late"))
    assert taken(queue) == [context, (1, 9), "token", end]
    assert reply.is_over and reply.is_stopped


@pytest.mark.parametrize("stops_stock", [True, False])
def test_a_reply_that_its_http_thread_stops_is_stopped(*, stops_stock: bool) -> None:
    reply, context, _ = reply_of(SimpleNamespace(client_gone=False))
    reply.stops_stock = stops_stock
    context.stop()
    assert reply.is_stopped and context._should_stop == stops_stock


def test_a_failed_device_ends_the_thread_after_its_client_is_told() -> None:
    reply, context, queue = reply_of(SimpleNamespace(client_gone=False))
    with pytest.raises(DeviceFailed):
        reply.put(error := DeviceFailed("the server ends"))
    assert taken(queue) == [context, error] and reply.is_over


def test_an_error_is_told_and_stops_the_reply() -> None:
    reply, context, queue = reply_of(SimpleNamespace(client_gone=False))
    assert not (reply.is_stopped or reply.is_over)
    reply.fail(error := ValueError("bad luck"))
    reply.put("token")
    assert taken(queue) == [context, error] and context._should_stop


@pytest.mark.parametrize("end", [ReplyQueue.put, ReplyQueue.fail])
def test_a_reply_that_never_began_can_fail(end: Callable[[ReplyQueue, Exception], None]) -> None:
    queue: Queue[Any] = Queue()
    client: Any = SimpleNamespace(client_gone=False)
    reply = ReplyQueue(queue, client)
    end(reply, error := ValueError("no such model"))
    assert taken(queue) == [error] and reply.is_over


def test_nothing_more_is_sent_to_a_client_that_left() -> None:
    reply, context, queue = reply_of(request := SimpleNamespace(client_gone=False))
    reply.put((1, 9))
    assert not reply.is_gone
    request.client_gone = True
    assert reply.is_gone and reply.is_stopped
    reply.put((2, 9))
    reply.put("token")
    first, progress, error = taken(queue)
    assert (first, progress) == (context, (1, 9)) and isinstance(error, ClientGone)
    assert context._should_stop


def test_clients_that_leave_are_noticed_whenever_they_came() -> None:
    requests = OpenRequests()
    assert requests.wait_for_none(0)
    for _ in range(2):  # the thread that looks ends in between
        left = threading.Event()
        unknown, leaves = (SimpleNamespace(request_type="", prompt="", messages=[]) for _ in "ab")
        leaves.client = SimpleNamespace(has_left=left.is_set)
        before = set(threading.enumerate())
        requests.begin(unknown)
        requests.begin(leaves)
        (looking,) = set(threading.enumerate()) - before
        assert looking.daemon, "the process would not end before the reply"
        assert len(requests) == 2 and not requests.wait_for_none(0.25)
        assert not ClientRequest.of(leaves).client_gone
        left.set()
        wait_until(lambda: len(requests) == 1, "the client that left", 5)
        assert ClientRequest.of(leaves).client_gone and not ClientRequest.of(unknown).client_gone
        requests.end(unknown)
        requests.end(unknown)
        assert requests.wait_for_none(5)
        wait_until(lambda: not requests._is_watched, "the end of the thread", 5)


def test_the_end_of_the_last_reply_ends_the_wait_for_it() -> None:
    requests = OpenRequests()
    requests.begin(request := SimpleNamespace())
    clock = threading.Timer(0.2, requests.end, (request,))
    clock.start()
    began = time.monotonic()
    assert requests.wait_for_none(30) and time.monotonic() - began < 20
    clock.join()


def test_the_last_bytes_of_a_reply_have_time_to_be_written() -> None:
    requests = OpenRequests()
    assert requests.wait_for_none(0)
    request = SimpleNamespace(client=None)
    requests.begin(request)
    requests.end(request)
    began = time.monotonic()
    assert requests.wait_for_none(0)
    assert time.monotonic() - began > LAST_BYTES_S / 2
