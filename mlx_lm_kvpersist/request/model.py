"""What is known of the model that the server has loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..cache.spec import ModelCacheSpec
from ..match.keys import Root
from ..match.text import TokenText


@dataclass(frozen=True)
class LoadedModel:
    """A model whose conversations are kept.

    `model` may be a weak proxy: the server drops a model before it loads the next, and two do not
    always fit into memory.
    """

    model: Any
    tokenizer: Any
    spec: ModelCacheSpec
    fingerprint: str
    text: TokenText | None
    """None when prompts are matched by ids: text is not to be stored, or not understood."""
    name: str = ""
    """What people call the model."""

    def root(self, namespace: str = "", session: str = "") -> Root:
        """Return the root of this model's tree for a tenant and, with isolation, a session."""
        return Root(
            self.fingerprint,
            self.spec.layout,
            namespace,
            session,
            with_text=self.text is not None,
            model=self.name,
        )

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids
