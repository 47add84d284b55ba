"""What is known of one request on its way through the server."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ..match.keys import Root
from .replies import Conversation


class Kind(Enum):
    """How a prompt relates to what is stored."""

    EXACT = "EXACT"
    """All but the last token are stored."""
    EXTEND = "EXTEND"
    """The prompt continues a stored conversation."""
    DIVERGE = "DIVERGE"
    """The prompt begins as a stored conversation does, and goes on differently."""
    MISS = "MISS"
    """Nothing stored begins as the prompt does."""
    STOCK = "STOCK"
    """This model's cache is not kept; the stock server's own prompt cache is used."""


class Tier(Enum):
    """Where the reused blocks were."""

    HOT = "hot"
    WARM = "warm"
    COLD = "cold"


@dataclass(frozen=True)
class Outcome:
    """What a request reused: of `n_prompt` tokens `n_reused`, `n_restored` of them from disk."""

    kind: Kind
    n_prompt: int
    n_reused: int = 0
    n_restored: int = 0
    restore_ms: float = 0.0

    @property
    def tier(self) -> Tier:
        if self.n_restored:
            return Tier.WARM
        return Tier.HOT if self.n_reused else Tier.COLD

    @property
    def header(self) -> str:
        """The value of the X-KVPersist response header."""
        return (
            f"outcome={self.kind.value}; tier={self.tier.value}; reused={self.n_reused}; "
            f"restored={self.n_restored}; restore_ms={self.restore_ms:.1f}"
        )


@dataclass
class RequestState:
    """Travels with a request from the HTTP thread to the generation thread and back."""

    session: str | None = None
    namespace: str = ""
    root: Root | None = None
    n_prompt: int = 0
    conversation: Conversation | None = field(default=None, repr=False)
    outcome: Outcome | None = None
    restored: tuple[list[Any], int] | None = field(default=None, repr=False)
    """Caches for the first so many tokens, until the server fetches them."""

    @staticmethod
    def of(request: Any) -> RequestState:
        """Return the state of a server's request, making it where there is none."""
        state: RequestState | None = getattr(request, "kvpersist", None)
        if state is None:
            state = request.kvpersist = RequestState()
        return state
