"""A request on its way through the server, and its sequence while that is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..block import Block, Root
from .lookup import Lookup
from .outcome import Outcome


@dataclass
class RequestState:
    """One request, from its HTTP thread to the generation thread and back.

    `session`, `namespace` and `is_kept` are set once, before the request is queued. `id` and
    `outcome` are set when the request enters, before its reply begins.
    """

    session: str | None = None
    namespace: str = ""
    is_kept: bool = True
    """Whether anything of it may be stored, on disk or in RAM."""
    id: str = ""
    outcome: Outcome | None = None
    root: Root | None = None
    """Of the tree that the request's tenant may see, once its model is loaded."""
    messages: Sequence[dict[str, Any]] = field(default=(), repr=False)
    """Those that the prompt was rendered from."""
    lookup: Lookup | None = field(default=None, repr=False)
    """The lookup of a request that has not entered. Generation thread."""
    sent: dict[str, Any] | None = field(default=None, repr=False)
    """The reply as the client got it, once it is whole. HTTP thread."""
    produced: tuple[Sequence[int], Sequence[int]] | None = field(default=None, repr=False)
    """The ids of the prompt and of the reply, once it has ended. Generation thread."""

    is_over: bool = False
    """Whether the reply has ended, or was given up."""

    @staticmethod
    def of(request: Any) -> RequestState:
        """Return the state of a server's request, made where there is none."""
        state: RequestState | None = getattr(request, "kvpersist", None)
        if state is None:
            state = request.kvpersist = RequestState()
        return state


@dataclass
class RunningSequence:
    """The tokens of a taken request while the server computes them. Generation thread.

    Of its `n_prompt` prompt tokens, the `ids`, the first `n_reused` were restored. `chain` holds
    the blocks of its beginning that are known so far.
    """

    request: RequestState
    n_prompt: int
    n_reused: int = 0
    chain: list[Block] = field(default_factory=list, repr=False)
    n_system: int = 0
    """Tokens of the prompt's system prompt."""
    ids: Sequence[int] = field(default=(), repr=False)
    temporary: set[bytes] = field(default_factory=set, repr=False)
    """Blocks with a checkpoint that is of use only until the prompt is computed."""
    is_computed: bool = False
    """Whether all of its prompt was computed."""

    @property
    def is_computing(self) -> bool:
        """Whether more of the prompt will be stored."""
        return not (self.is_computed or self.request.is_over)

    @property
    def n_saved(self) -> int:
        """How many of its first tokens are in stored blocks."""
        return self.chain[-1].stop if self.chain else 0

    @property
    def root(self) -> Root:
        assert self.request.root is not None
        return self.request.root
