"""What is known of one request on its way through the server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..match.block import Block
from ..match.keys import Root
from .lookup import Lookup
from .outcome import Outcome

__all__ = ["RequestState", "Sequence"]


@dataclass
class RequestState:
    """One request, from its HTTP thread to the generation thread and back.

    `session` and `namespace` are set once, before the request is queued. `id` and `outcome` are
    set when the request enters, before its reply begins.
    """

    session: str | None = None
    namespace: str = ""
    id: str = ""
    outcome: Outcome | None = None
    root: Root | None = None
    """Of the tree that the request's tenant may see, once its model is loaded."""
    messages: list[dict[str, Any]] = field(default_factory=list, repr=False)
    """Those that the prompt was rendered from."""
    lookup: Lookup | None = field(default=None, repr=False)
    """The lookup of a request that waits for its prefetch. Generation thread."""
    sent: dict[str, Any] | None = field(default=None, repr=False)
    """The reply as the client got it, once it is whole. HTTP thread."""
    produced: tuple[list[int], list[int]] | None = field(default=None, repr=False)
    """The ids of the prompt and of the reply, once it has ended. Generation thread."""

    @staticmethod
    def of(request: Any) -> RequestState:
        """Return the state of a server's request, made where there is none."""
        state: RequestState | None = getattr(request, "kvpersist", None)
        if state is None:
            state = request.kvpersist = RequestState()
        return state


@dataclass
class Sequence:
    """The tokens of a taken request while the server computes them. Generation thread.

    Of its `n_prompt` prompt tokens the first `n_reused` were restored. `chain` holds the blocks
    of its beginning that are known so far.
    """

    request: RequestState
    n_prompt: int
    n_reused: int = 0
    chain: list[Block] = field(default_factory=list, repr=False)
    entered_s: float | None = None
    """When it was handed on to be prefilled (perf_counter); None once that is measured."""

    @property
    def root(self) -> Root:
        assert self.request.root is not None
        return self.request.root
