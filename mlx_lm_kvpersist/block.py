"""Blocks and their keys: a hash chain, so each key identifies a whole prefix."""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from hashlib import blake2b
from itertools import chain
from typing import ClassVar

from .image_ids import ids_of, words_of

KEY_BYTES = 16
"""Up to about 2**64 different prefixes, two equal keys are unlikely."""


@dataclass(frozen=True)
class Root:
    """The model, precision and tenant of a tree of blocks. Two trees share no block.

    `layout` is the form of the KV (`ModelCacheSpec.layout`). `session` is empty without isolation.
    `with_text`: whether the blocks' text is stored. `model` is a name for people.
    """

    fingerprint: str
    layout: str
    namespace: str = ""
    session: str = ""
    with_text: bool = True
    model: str = field(default="", compare=False)

    def shares_tenant(self, root: Root) -> bool:
        return (self.namespace, self.session) == (root.namespace, root.session)

    @cached_property
    def key(self) -> bytes:
        """The parent key of the tree's first blocks."""
        digest = blake2b(digest_size=KEY_BYTES, person=b"kvpersist-root-1")
        text = "text" if self.with_text else "ids"
        for name in (self.fingerprint, self.layout, self.namespace, self.session, text):
            encoded = name.encode("utf-8", "surrogatepass")
            digest.update(len(encoded).to_bytes(8, "little"))
            digest.update(encoded)
        return digest.digest()

    @property
    def tenant_json(self) -> str:
        """The part of `to_json` that names tenant and session."""
        return json.dumps({"namespace": self.namespace, "session": self.session})[1:-1]

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    @lru_cache(maxsize=64)  # most files of a store have the same few roots
    def from_json(cls, text: str) -> Root:
        """Read the text of `to_json`. Raises ValueError or TypeError for any other text."""
        return cls(**json.loads(text))


def block_key(parent: bytes, ids: bytes) -> bytes:
    """Return the key of the block that holds `ids` (packed, see `pack_ids`) below `parent`."""
    return blake2b(parent + ids, digest_size=KEY_BYTES, person=b"kvpersist-blok-1").digest()


def pack_ids(ids: Sequence[int]) -> bytes:
    """Return token ids as little-endian int32; an image's first token takes nine such words."""
    try:
        return array("i", ids).tobytes()
    except OverflowError:
        return array("i", chain.from_iterable(map(words_of, ids))).tobytes()


def unpack_ids(packed: bytes) -> list[int]:
    """Return the token ids that `pack_ids` packed; damaged bytes give wrong ids."""
    words = array("i", packed).tolist()
    if packed[3::4].isascii():  # no negative id, so no image
        return words
    return ids_of(words)


def n_packed(packed: bytes) -> int:
    return len(packed) // 4 if packed[3::4].isascii() else len(unpack_ids(packed))


BLOCK_TOKENS = 256
"""The number of tokens of a full block."""


@dataclass(frozen=True)
class Block:
    """A block of up to BLOCK_TOKENS tokens; `start` tokens are before it.

    `parent` is the key of the block before it, or of the root. `text` has the characters that
    become complete in this block. `pending` has the bytes of an incomplete character at its end.
    Comparisons ignore the text, because the ids up to the block's end determine it.
    """

    folder: ClassVar[str] = "blocks"
    key: bytes
    parent: bytes
    start: int = 0
    packed_ids: bytes = b""
    text: str = field(default="", compare=False)
    pending: bytes = field(default=b"", compare=False)
    n_tokens: int = field(init=False, repr=False, compare=False)
    stop: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        n_tokens = n_packed(self.packed_ids)
        vars(self).update(n_tokens=n_tokens, stop=self.start + n_tokens)

    @cached_property
    def is_genuine(self) -> bool:
        """Whether the key is the hash of the content."""
        return block_key(self.parent, self.packed_ids) == self.key

    @property
    def has_text_only(self) -> bool:
        return self.packed_ids[3::4].isascii()

    @cached_property
    def ids(self) -> list[int]:
        return unpack_ids(self.packed_ids)

    def __str__(self) -> str:
        return f"block {self.key.hex()}"


@dataclass(frozen=True)
class Checkpoint:
    """The content of windows or recurrent layers at the end of the block with the key `block`.

    It has a separate file, which may be evicted before the block's file. To resume at the block's
    end, a model may need several: a state, and windows of this block and of earlier blocks.

    A checkpoint of the `kind` "state" has the state of recurrent layers, and the newest tokens of
    quantized layers. "window-512" is the KV of layers that see 512 tokens. `n_tokens` is how many
    tokens at the block's end the checkpoint covers, 0 for a state.
    """

    folder: ClassVar[str] = "checkpoints"
    key: bytes
    block: bytes
    kind: str
    n_tokens: int

    @classmethod
    def at(cls, block: bytes, kind: str, n_tokens: int) -> Checkpoint:
        """Return the checkpoint of a block. Raises OverflowError if `n_tokens` is too large."""
        # `block` and number have fixed lengths: different checkpoints never hash the same bytes.
        content = block + kind.encode() + n_tokens.to_bytes(4, "little", signed=True)
        key = blake2b(content, digest_size=KEY_BYTES, person=b"kvpersist-ckpt-1").digest()
        return cls(key, block, kind, n_tokens)

    @cached_property
    def is_genuine(self) -> bool:
        return Checkpoint.at(self.block, self.kind, self.n_tokens) == self

    def __str__(self) -> str:
        return f"checkpoint {self.key.hex()}"


Record = Block | Checkpoint
