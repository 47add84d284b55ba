"""The tokens of a request while the server computes them, and the blocks that hold them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..block import Block, Root
from ..store.records import Leaf


@dataclass(eq=False)
class RunningSequence:
    """The tokens of a request that has entered. Generation thread.

    The first `n_reused` of its `n_prompt` prompt tokens, the `packed_ids`, were restored. `chain`
    holds the stored blocks of its beginning. Its leaf has `session`, `note` and `messages`.
    """

    root: Root
    n_prompt: int
    n_reused: int = 0
    chain: list[Block] = field(default_factory=list, repr=False)
    n_system: int = 0
    """Tokens of the prompt's system prompt."""
    packed_ids: bytes = field(default=b"", repr=False)
    session: str | None = None
    note: Mapping[str, str] = field(default_factory=dict, repr=False)
    messages: Sequence[dict[str, Any]] = field(default=(), repr=False)
    draft: RunningSequence | None = None
    """The same tokens in the caches of the draft model."""
    is_draft: bool = False

    @property
    def n_saved(self) -> int:
        """The number of its first tokens that are in stored blocks."""
        return self.chain[-1].stop if self.chain else 0

    def leaf(self, chain: Sequence[Block], replaced: Iterable[tuple[bytes, bytes]] = ()) -> Leaf:
        """Return the leaf of its conversation, whose blocks are `chain`."""
        end, with_text = chain[-1], self.root.with_text
        note = {name: text for name, text in self.note.items() if name != "words" or with_text}
        moved, is_session = tuple(replaced), not self.is_draft
        return Leaf(self.session, end.key, end.stop, moved, note, self.messages, is_session)
