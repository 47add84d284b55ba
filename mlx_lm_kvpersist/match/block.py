"""The record of a block, from the prompt to its file: what is known of it without its arrays."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from .keys import block_key, checkpoint_key, unpack_ids

__all__ = ["BLOCK", "Block", "checkpoint"]

BLOCK = "block"
"""The kind of a block of tokens. Every other kind is a checkpoint's."""


@dataclass(frozen=True)
class Block:
    """A block of up to 256 tokens, or a checkpoint at the end of one.

    Of a block of tokens, `parent` is the key of the block before it, or of the root. `start` is the
    number of tokens before it, `packed_ids` its token ids as little-endian int32, `text` the
    characters that become complete inside of it, and `pending` the bytes of an incomplete
    character at its end.

    A checkpoint has what windows and recurrent layers hold at the end of the block `parent`, in a
    file of its own that may be evicted before the block is. `kind` says what it holds: "state", of
    recurrent layers, or "window-512", the KV of layers that see 512 tokens. `n_covered` are the
    last tokens of the block that it covers, 0 for a state.
    """

    key: bytes
    parent: bytes
    start: int = 0
    packed_ids: bytes = b""
    text: str = ""
    pending: bytes = b""
    kind: str = BLOCK
    n_covered: int = 0

    @property
    def is_checkpoint(self) -> bool:
        return self.kind != BLOCK

    @property
    def n_tokens(self) -> int:
        """Tokens whose KV it holds."""
        return self.n_covered if self.kind != BLOCK else len(self.packed_ids) // 4

    @property
    def stop(self) -> int:
        return self.start + self.n_tokens

    @cached_property
    def is_genuine(self) -> bool:
        """Whether it is what its key was made of."""
        if self.is_checkpoint:
            return checkpoint_key(self.parent, self.kind, self.n_covered) == self.key
        return block_key(self.parent, self.packed_ids) == self.key

    @cached_property
    def ids(self) -> list[int]:
        return unpack_ids(self.packed_ids)

    def __str__(self) -> str:
        return f"{'checkpoint' if self.is_checkpoint else 'block'} {self.key.hex()}"


def checkpoint(block: bytes, kind: str, n_covered: int) -> Block:
    """Return the record of a checkpoint at the end of `block`.

    Raises OverflowError beyond int32.
    """
    key = checkpoint_key(block, kind, n_covered)
    return Block(key, block, kind=kind, n_covered=n_covered)
