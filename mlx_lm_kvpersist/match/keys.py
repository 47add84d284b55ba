"""Keys of blocks: a hash chain, so that a key stands for a whole prefix."""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from hashlib import blake2b

KEY_BYTES = 16
"""128 bits: two different prefixes share a key by accident once in about 2**64 blocks."""


MAX_NAME_BYTES = 256


def short_name(name: str) -> str:
    """Return a client's name for something; a digest of it if it is long or not valid Unicode.

    Names stand in the index, and clients can make as many as they like.
    """
    encoded = name.encode("utf-8", "surrogatepass")
    if len(encoded) <= MAX_NAME_BYTES and encoded.decode("utf-8", "ignore") == name:
        return name
    return f"digest-{blake2b(encoded, digest_size=16, person=b'kvpersist-name-1').hexdigest()}"


@dataclass(frozen=True)
class Root:
    """What a tree of blocks is for. Nothing is shared between roots.

    `fingerprint` tells models apart, `precision` the way their KV is quantized, `namespace`
    tenants, and `session` (with isolation) single sessions. `with_text` says whether the blocks'
    text is stored, too. `model` is for people to read.
    """

    fingerprint: str
    precision: str
    namespace: str = ""
    session: str = ""
    with_text: bool = True
    model: str = field(default="", compare=False)

    @cached_property
    def key(self) -> bytes:
        """The key above the tree's first blocks."""
        digest = blake2b(digest_size=KEY_BYTES, person=b"kvpersist-root-1")
        text = "text" if self.with_text else "ids"
        for part in (self.fingerprint, self.precision, self.namespace, self.session, text):
            encoded = part.encode("utf-8", "surrogatepass")
            digest.update(len(encoded).to_bytes(8, "little"))
            digest.update(encoded)
        return digest.digest()

    def to_json(self) -> str:
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    @lru_cache(maxsize=64)  # the files of a store have the same one
    def from_json(cls, text: str) -> Root:
        """Read `to_json`. Raises ValueError or TypeError when it is something else."""
        return cls(**json.loads(text))


def block_key(parent: bytes, ids: bytes) -> bytes:
    """Return the key of the block that holds `ids` (packed, see `pack_ids`) below `parent`."""
    return blake2b(parent + ids, digest_size=KEY_BYTES, person=b"kvpersist-blok-1").digest()


def checkpoint_key(block: bytes, kind: str, n_tokens: int) -> bytes:
    """Return the key of a checkpoint of this kind, over the last `n_tokens` of `block`.

    Both ends have a fixed length, so different checkpoints never hash the same bytes. Raises
    OverflowError beyond int32.
    """
    content = block + kind.encode() + n_tokens.to_bytes(4, "little", signed=True)
    return blake2b(content, digest_size=KEY_BYTES, person=b"kvpersist-part-1").digest()


def pack_ids(ids: Iterable[int]) -> bytes:
    """Return token ids as little-endian int32."""
    packed = array("i", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(packed: bytes) -> list[int]:
    """Return the token ids of `pack_ids`."""
    ids = array("i")
    ids.frombytes(packed)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()
