"""Objects that answer in time, or not at all: nothing else ends an operation in a hanging folder.

A few threads run the operations. An operation that hangs keeps its thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TooLate
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Any

from ..errors import NoAnswer
from .objects import ListedObject, Objects
from .threads import Result, Threads

ANSWER_S = 9.0
"""How long a store may take for one operation."""
_N_THREADS = 8
"""The six threads that fetch, the thread that puts, and a spare may each wait for an operation."""
_AT_ONCE = 500
"""Objects that are listed or removed in one operation."""


class TimedObjects:
    """Objects in one place. Any thread.

    Raises what `Objects` raises, and NoAnswer if an operation takes longer than `ANSWER_S`. All
    operations raise NoAnswer at once until that operation ends or `try_again` is called.

    The constructor opens the place, and raises ConfigError if the place cannot be used. If the
    place does not answer, `is_hanging` is true.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._threads = Threads(_N_THREADS, "kvpersist-objects")
        self._late: Future[Any] | None = None
        """The operation that was given up last."""
        with suppress(NoAnswer):
            self._ask(objects.open)

    @property
    def is_hanging(self) -> bool:
        return self._late is not None and not self._late.done()

    def try_again(self) -> None:
        """Let the next operation be tried, although another one hangs."""
        self._late = None

    def close(self) -> None:
        self._threads.close(0)

    def _ask(self, operation: Callable[..., Result], *args: object) -> Result:
        late = NoAnswer(f"it has not answered for {ANSWER_S:.0f} s")
        if self.is_hanging:
            raise late
        future = self._threads.submit(partial(operation, *args))
        try:
            return future.result(ANSWER_S)
        except TooLate:
            if future.done():  # the operation has raised it
                raise
            future.cancel()
            self._late = future
            raise late from None

    def get(self, name: str, max_bytes: int) -> bytes:
        return self._ask(self._objects.get, name, max_bytes)

    def age_s(self, name: str) -> float | None:
        return self._ask(self._objects.age_s, name)

    def put(self, name: str, content: bytes) -> None:
        self._ask(self._objects.put, name, content)

    def list(self) -> Iterator[ListedObject]:
        found = iter(self._ask(self._objects.list))
        while some := self._ask(lambda: [*islice(found, _AT_ONCE)]):
            yield from some

    def delete(self, names: Sequence[str]) -> None:
        for first in range(0, len(names), _AT_ONCE):
            self._ask(self._objects.delete, names[first : first + _AT_ONCE])
