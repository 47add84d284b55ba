"""One request, from its arrival to the end of its reply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from secrets import token_hex
from threading import Event
from typing import Any

from ..block import Root
from ..host.hooks import Prompt
from .lookup import Lookup
from .outcome import Outcome
from .sequence import RunningSequence


class Stage(Enum):
    """The stage of a request. Only `RequestState.move` changes it."""

    NEW = "new"
    """It waits for memory."""
    FETCHING = "fetching"
    """Its blocks are read and joined, or another request computes blocks that it needs."""
    READY = "ready"
    """It may enter the batch."""
    PREFILL = "prefill"
    """Its prompt is computed."""
    DECODE = "decode"
    """Its reply is computed."""
    PARKED = "parked"
    """Its reply was taken out of the batch, and waits for memory."""
    DONE = "done"
    """Its reply has ended, or its client has left. No other stage follows."""


@dataclass(eq=False)
class RequestState:
    """One request, from its HTTP thread to the generation thread and back.

    `session`, `namespace` and `is_kept` are set once, before the request is queued, and `outcome`
    before its reply begins.
    """

    session: str | None = None
    namespace: str = ""
    note: Mapping[str, str] = field(default_factory=dict, repr=False)
    """For people: the `client`, and the first `words` of its user."""
    is_kept: bool = True
    """Whether its tokens may be stored, on disk or in RAM."""
    id: str = field(default_factory=lambda: f"kvp-{token_hex(8)}")
    """Random: a growing number would show how many requests the server gets."""
    stage: Stage = Stage.NEW
    outcome: Outcome | None = None
    saved_s: float | None = None
    """Seconds to compute the tokens that it reused, if known."""
    n_prompt: int = 0
    """Tokens of its prompt, if stock serves it."""
    root: Root | None = None
    """The root of the tree that the request's tenant may see, once its model is loaded."""
    messages: Sequence[dict[str, Any]] = field(default=(), repr=False)
    rendered: Prompt | None = field(default=None, repr=False)
    """The prompt that was looked up."""
    digest: tuple[int, str] | None = field(default=None, repr=False)
    """The size in bytes and the digest of the text that is fed, if it is known."""
    fetched: str = ""
    """A sentence about the fetch from the shared tier, or ""."""
    lookup: Lookup | None = field(default=None, repr=False)
    """None once the request has entered."""
    sequence: RunningSequence | None = field(default=None, repr=False)
    """Its tokens, once it has entered. Generation thread."""
    sent: dict[str, Any] | None = field(default=None, repr=False)
    """The reply as sent to the client, once it is complete. HTTP thread."""
    produced: tuple[Sequence[int], Sequence[int]] | None = field(default=None, repr=False)
    """The ids of the prompt and of the reply, once it has ended. Generation thread."""
    is_saved: Event | None = field(default=None, repr=False)
    """Set when a reply that has ended was handed to the store; None for a prompt not served."""
    ended: RunningSequence | None = field(default=None, repr=False)
    """The sequence that was handed to the store, until its client has the reply."""
    remembered: frozenset[bytes] = field(default=frozenset(), repr=False)
    """The keys by which the ids of the reply are found."""

    def __getstate__(self) -> dict[str, Any]:
        """Return the fields that other ranks need."""
        names = ("session", "namespace", "is_kept")
        return {name: getattr(self, name) for name in names} | {"note": dict(self.note)}

    def __setstate__(self, fields: dict[str, Any]) -> None:
        self.__init__(**fields)  # type: ignore[misc]

    @staticmethod
    def of(request: Any) -> RequestState:
        """Return the state of a server's request; the first call makes it."""
        state: RequestState | None = getattr(request, "kvpersist", None)
        if state is None:
            state = request.kvpersist = RequestState()
        return state

    def move(self, stage: Stage) -> None:
        """Enter the next stage, unless the request is done. A done request holds no blocks."""
        if self.stage is not Stage.DONE:
            self.stage = stage
        if stage is Stage.DONE:
            self.drop_lookup()

    def drop_lookup(self) -> None:
        """Release the blocks that were read for the request. Any thread."""
        if (lookup := self.lookup) is not None:
            lookup.close()
