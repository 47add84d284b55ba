"""A prompt on its way to the model, and the token list that remembers its request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, SupportsIndex, overload


@dataclass(frozen=True)
class Prompt:
    """A tokenized prompt, cut into segments as `ResponseGenerator._tokenize` does.

    The segments joined are `ids`; `segment_types` names each as "system", "user" or "assistant".
    """

    ids: list[int]
    segments: list[list[int]]
    segment_types: list[str]


class RequestTokens(list[int]):
    """Token ids that know which request they belong to.

    The stock server hands a prompt's ids, and slices of them, through the batch generator and
    back to the prompt cache; the request itself does not make that journey. Slices and in-place
    appends keep `request`, so the prompt cache knows whose cache it is given.
    """

    def __init__(self, ids: list[int], request: Any) -> None:
        super().__init__(ids)
        self.request = request

    @overload
    def __getitem__(self, index: SupportsIndex) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> RequestTokens: ...
    def __getitem__(self, index: SupportsIndex | slice) -> int | RequestTokens:
        if isinstance(index, slice):
            return RequestTokens(super().__getitem__(index), self.request)
        return super().__getitem__(index)

    def __reduce__(self) -> tuple[Any, ...]:
        return (list, (list(self),))
