"""What is known of one request on its way through the server."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..host.prompt import Prompt
from ..match.keys import Root
from ..match.tree import Node
from ..store.block_store import ReadAhead
from .outcome import Kind, Outcome, Tier
from .replies import Conversation, KnownReply

__all__ = ["Kind", "Outcome", "RequestState", "Tier"]


@dataclass
class RequestState:
    """Travels with a request from the HTTP thread to the generation thread and back."""

    session: str | None = None
    namespace: str = ""
    id: str = ""
    root: Root | None = None
    n_prompt: int = 0
    conversation: Conversation | None = field(default=None, repr=False)
    known_replies: list[KnownReply] = field(default_factory=list, repr=False)
    sent: dict[str, Any] | None = field(default=None, repr=False)
    """The reply as the client got it, once it is whole. HTTP thread."""
    said: list[int] | None = field(default=None, repr=False)
    """The reply's ids, once it has ended. Generation thread."""
    outcome: Outcome | None = None
    ready_s: float | None = None
    """When the prompt was handed on to be prefilled (perf_counter); None once that is measured."""
    respelled: tuple[Prompt, Prompt] | None = field(default=None, repr=False)
    """The prompt as it was rendered and as it was respelled, where it was read ahead for."""
    ahead: ReadAhead | None = field(default=None, repr=False)
    restored: tuple[list[Any], int] | None = field(default=None, repr=False)
    """Caches for the first so many tokens, until the server fetches them."""
    chain: list[Node] = field(default_factory=list, repr=False)
    """The blocks of its sequence so far, where they end at restore points."""

    @staticmethod
    def of(request: Any) -> RequestState:
        """Return the state of a server's request, making it where there is none."""
        state: RequestState | None = getattr(request, "kvpersist", None)
        if state is None:
            state = request.kvpersist = RequestState()
        return state
