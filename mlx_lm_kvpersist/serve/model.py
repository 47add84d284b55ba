"""What is known of the model that the server has loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..kv.spec import ModelCacheSpec
from ..match.keys import root_key
from ..match.text import TokenText


@dataclass(frozen=True)
class LoadedModel:
    """A model whose conversations are kept."""

    model: Any
    tokenizer: Any
    spec: ModelCacheSpec
    fingerprint: str
    text: TokenText | None
    """None when this tokenizer can only be matched by ids."""

    def root(self, namespace: str, session: str) -> bytes:
        return root_key(self.fingerprint, str(self.spec.precision), namespace, session)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids
