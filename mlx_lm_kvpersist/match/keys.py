"""Keys of blocks: a hash chain, so that a key stands for a whole prefix."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from hashlib import blake2b

KEY_BYTES = 16
"""128 bits: two different prefixes share a key by accident once in about 2**64 blocks."""


def root_key(fingerprint: str, precision: str, namespace: str = "", session: str = "") -> bytes:
    """Return the key above a tree's first blocks.

    Nothing is shared between roots: `fingerprint` tells models apart, `precision` the way their
    KV is quantized, `namespace` tenants, and `session` (with isolation) single sessions.
    """
    digest = blake2b(digest_size=KEY_BYTES, person=b"kvpersist-root-1")
    for part in (fingerprint, precision, namespace, session):
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little"))
        digest.update(encoded)
    return digest.digest()


def block_key(parent: bytes, ids: bytes) -> bytes:
    """Return the key of the block that holds `ids` (packed, see `pack_ids`) below `parent`."""
    return blake2b(parent + ids, digest_size=KEY_BYTES, person=b"kvpersist-blok-1").digest()


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
