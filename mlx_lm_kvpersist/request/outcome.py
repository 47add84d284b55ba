"""What a request reused, and the reason where it was less than it might have been."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any


class Kind(Enum):
    """How a prompt relates to what is stored."""

    EXACT = "EXACT"
    """All but the last token are stored."""
    EXTEND = "EXTEND"
    """The prompt continues a stored conversation."""
    DIVERGE = "DIVERGE"
    """The prompt begins as a stored conversation does, and goes on differently."""
    MISS = "MISS"
    """Nothing of the prompt was reused."""
    STOCK = "STOCK"
    """Not kept by the plugin; the stock server's own prompt cache is used."""


class Tier(Enum):
    """Where the reused blocks were."""

    HOT = "hot"
    WARM = "warm"
    COLD = "cold"


class Reason(Enum):
    """Why not more was reused."""

    NOTHING_ALIKE = "nothing stored begins like this"
    PARTED = "the prompt parts from what is stored"
    OTHER_MODEL = "stored for another model"
    OTHER_PRECISION = "stored in another KV precision"
    OTHER_NAMESPACE = "stored in another namespace or session"
    EVICTED = "evicted to keep to the budget"
    QUARANTINED = "in quarantine, a check failed"
    BELOW_THRESHOLD = "less than --kvpersist-min-reuse"
    NOT_WORTH_IT = "restoring would take longer than computing"
    NO_POINT = "the model can go on only from an earlier restore point"
    NOT_KEPT = "not kept"


@dataclass(frozen=True)
class Parting:
    """Where a prompt parts from the nearest stored branch.

    `char` counts in the whole rendered prompt. `message` is the index of the message it falls
    into, `role` whose it is and `message_char` the character in its content; None between
    messages. `stored` and `asked` are what follows on either side.
    """

    char: int
    message: int | None
    role: str | None
    message_char: int | None
    stored: str
    asked: str


@dataclass(frozen=True)
class Outcome:
    """What a request reused: of `n_prompt` tokens `n_reused`, `n_restored` of them from disk."""

    kind: Kind
    n_prompt: int
    n_reused: int = 0
    n_restored: int = 0
    restore_ms: float = 0.0
    reason: Reason | None = None
    detail: str = ""
    parting: Parting | None = None

    @property
    def tier(self) -> Tier:
        if self.n_restored:
            return Tier.WARM
        return Tier.HOT if self.n_reused else Tier.COLD

    @property
    def header(self) -> str:
        """The value of the X-KVPersist response header: no text of anybody's."""
        return (
            f"outcome={self.kind.value}; tier={self.tier.value}; reused={self.n_reused}; "
            f"restored={self.n_restored}; restore_ms={self.restore_ms:.1f}"
        )

    def to_json(self) -> dict[str, Any]:
        parting = self.parting
        return {
            "outcome": self.kind.value,
            "tier": self.tier.value,
            "prompt_tokens": self.n_prompt,
            "reused_tokens": self.n_reused,
            "restored_tokens": self.n_restored,
            "restore_ms": round(self.restore_ms, 2),
            "reason": self.reason.value if self.reason else None,
            "detail": self.detail or None,
            "parting": vars(parting).copy() if parting else None,
        }


def parting_of(
    text: str, n_agreed: int, stored_next: str, messages: list[dict[str, Any]], n_shown: int = 40
) -> Parting:
    """Place a character of the rendered prompt in the messages that it was rendered from.

    Templates put content in as it is, so the messages are found in the text, one after another.
    """
    asked = text[n_agreed : n_agreed + n_shown]
    position = 0
    for index, message in enumerate(messages):
        content = message.get("content")
        if not isinstance(content, str) or not content.strip():
            continue
        # A template may trim.
        content = content if text.find(content, position) >= 0 else content.strip()
        start = text.find(content, position)
        if start < 0:
            continue
        if n_agreed < start:
            break
        position = start + len(content)
        if n_agreed < position:
            char = n_agreed - start
            return Parting(n_agreed, index, message.get("role"), char, stored_next, asked)
    return Parting(n_agreed, None, None, None, stored_next, asked)
