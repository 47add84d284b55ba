"""The queue of a reply: its items, its errors, and clients that leave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from queue import Queue
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_lm_kvpersist.errors import ClientGone, DeviceFailed
from mlx_lm_kvpersist.host.scheduling.waiting import (
    ReplyQueue,
)


class Context:
    """The first item that stock puts into a reply's queue."""

    _should_stop = False
    prompt: Sequence[int] = ()

    def stop(self) -> None:
        self._should_stop = True


def reply_of(request: Any) -> tuple[ReplyQueue, Context, Queue[Any]]:
    queue: Queue[Any] = Queue()
    reply, context = ReplyQueue(queue, request), Context()
    reply.put(context)
    return reply, context, queue


def all_items(queue: Queue[Any]) -> list[Any]:
    return [queue.get() for _ in range(queue.qsize())]


@pytest.mark.parametrize("end", [None, ValueError("bad luck")])
def test_items_after_the_end_of_a_reply_are_dropped(end: Any) -> None:
    reply, context, queue = reply_of(SimpleNamespace(client_gone=False))
    for item in ((1, 9), "token", end, "late", None):
        reply.put(item)
    reply.fail(ValueError("too late"))
    assert all_items(queue) == [context, (1, 9), "token", end]
    assert reply.is_over and reply.is_stopped


@pytest.mark.parametrize("stops_stock", [True, False])
def test_stopped_context_stops_the_reply_and_optionally_stock(*, stops_stock: bool) -> None:
    reply, context, _ = reply_of(SimpleNamespace(client_gone=False))
    reply.stops_stock = stops_stock
    context.stop()
    assert reply.is_stopped and context._should_stop == stops_stock


def test_device_failure_is_queued_for_the_client_and_raised() -> None:
    reply, context, queue = reply_of(SimpleNamespace(client_gone=False))
    with pytest.raises(DeviceFailed):
        reply.put(error := DeviceFailed("the server ends"))
    assert all_items(queue) == [context, error] and reply.is_over


def test_failing_a_reply_queues_the_error_and_stops_the_context() -> None:
    reply, context, queue = reply_of(SimpleNamespace(client_gone=False))
    assert not (reply.is_stopped or reply.is_over)
    reply.fail(error := ValueError("bad luck"))
    reply.put("token")
    assert all_items(queue) == [context, error] and context._should_stop


@pytest.mark.parametrize("end", [ReplyQueue.put, ReplyQueue.fail])
def test_a_reply_that_never_began_can_fail(end: Callable[[ReplyQueue, Exception], None]) -> None:
    queue: Queue[Any] = Queue()
    client: Any = SimpleNamespace(client_gone=False)
    reply = ReplyQueue(queue, client)
    end(reply, error := ValueError("no such model"))
    assert all_items(queue) == [error] and reply.is_over


def test_client_that_left_gets_only_a_client_gone_error() -> None:
    reply, context, queue = reply_of(request := SimpleNamespace(client_gone=False))
    reply.put((1, 9))
    assert not reply.is_gone
    request.client_gone = True
    assert reply.is_gone and reply.is_stopped
    reply.put((2, 9))
    reply.put("token")
    first, progress, error = all_items(queue)
    assert (first, progress) == (context, (1, 9)) and isinstance(error, ClientGone)
    assert context._should_stop
