"""Parts: KV that belongs to the end of a block, and that may go before the block does."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

from ..match.keys import KEY_BYTES

__all__ = ["Part"]


@dataclass(frozen=True)
class Part:
    """State or KV at the end of a block, in a file of its own.

    `block` is the key of that block. `kind` says what the part holds: "state", of recurrent
    layers behind the block's last token, or "window-512", the KV of layers that see 512 tokens.
    `n_tokens` are the last tokens of the block that it covers, 0 for a state.
    """

    block: bytes
    kind: str
    n_tokens: int

    @cached_property
    def key(self) -> bytes:
        """The hash of all three, [KEY_BYTES]. Raises OverflowError beyond int32.

        Both ends have a fixed length, so different parts never hash the same bytes.
        """
        content = self.block + self.kind.encode() + self.n_tokens.to_bytes(4, "little", signed=True)
        return blake2b(content, digest_size=KEY_BYTES, person=b"kvpersist-part-1").digest()
