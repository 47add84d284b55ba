"""The index as serving threads see it: where it cannot be read, nothing is stored."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from .index import Index
from .small_state import SmallState

Asked = ParamSpec("Asked")
Answer = TypeVar("Answer")


def _forgiving(
    question: Callable[Concatenate[Index, Asked], Answer],
    otherwise: Callable[[], Answer],
    doing: str = "read the index",
) -> Callable[Concatenate[IndexView, Asked], Answer]:
    def ask(view: IndexView, /, *args: Asked.args, **kwargs: Asked.kwargs) -> Answer:
        try:
            return question(view.index, *args, **kwargs)
        except (OSError, sqlite3.Error) as error:
            view.failed(doing, error)
            return otherwise()

    return ask


def _of_state(
    question: Callable[Concatenate[SmallState, Asked], Answer],
) -> Callable[Concatenate[Index, Asked], Answer]:
    def ask(index: Index, /, *args: Asked.args, **kwargs: Asked.kwargs) -> Answer:
        return question(index.state, *args, **kwargs)

    return ask


def _nothing() -> None:
    return None


class IndexView:
    """Questions to the index that never raise: a failure is reported and answered as a miss.

    It is also what the measurements of a model are persisted by (`cache/measuring/persisted.py`).
    """

    def __init__(self, index: Index, failed: Callable[[str, Exception], None]) -> None:
        self.index = index
        self.failed = failed

    children = _forgiving(Index.children, list)
    branches = _forgiving(Index.branches, set)
    checkpoints = _forgiving(Index.checkpoints, list)
    has_block = _forgiving(Index.__contains__, bool)
    has_checkpoint = _forgiving(Index.has_checkpoint, bool)
    sessions_at = _forgiving(Index.sessions_at, list)
    roots = _forgiving(Index.roots, list)
    replies = _forgiving(_of_state(SmallState.replies), dict)
    get = _forgiving(_of_state(SmallState.get), _nothing)
    under = _forgiving(_of_state(SmallState.under), dict)
    put = _forgiving(_of_state(SmallState.put), _nothing, "persist what was measured")
