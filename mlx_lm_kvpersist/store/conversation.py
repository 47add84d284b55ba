"""What a conversation is found by in a shared store: its newest chain, by its first messages.

With it, replies that another server computed are found by their text, or by what was remembered.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import takewhile
from typing import Any

from ..block import KEY_BYTES, Block, Checkpoint, Root, block_key
from .files import MALFORMED

MAX_BYTES = 64 << 20
"""The most bytes of such an object, packed or not."""
OPENING_TOKENS = 64
_MAX_REPLIES = 256
_FORMAT = 1
DAMAGED = (*MALFORMED, zlib.error)


@dataclass(frozen=True)
class Conversation:
    """A chain with its checkpoints, and packed ids of replies by digest, as `Commit` has them."""

    chain: tuple[Block, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()
    replies: Mapping[bytes, bytes] = field(default_factory=dict)

    def packed(self) -> bytes:
        """Return it as JSON, compressed; of many replies, the newest."""
        place = {block.key: n for n, block in enumerate(self.chain)}
        replies = list(self.replies.items())[-_MAX_REPLIES:]
        content = {
            "format": _FORMAT,
            "blocks": [
                [block.packed_ids.hex(), block.text, block.pending.hex()] for block in self.chain
            ],
            "checkpoints": [[place[o.block], o.kind, o.n_tokens] for o in self.checkpoints],
            "replies": [[digest.hex(), ids.hex()] for digest, ids in replies],
        }
        return zlib.compress(json.dumps(content).encode())

    @classmethod
    def unpacked(cls, packed: bytes, root: Root) -> Conversation:
        """Read `packed`; an empty one of another format. Raises one of DAMAGED."""
        content = json.loads(zlib.decompressobj().decompress(packed, MAX_BYTES))
        if content["format"] != _FORMAT:
            return cls()
        chain: list[Block] = []
        parent, start = root.key, 0
        for ids, text, pending in content["blocks"]:
            packed_ids = bytes.fromhex(ids)
            key = block_key(parent, packed_ids)
            text.encode()  # else SQLite does not take it
            chain.append(Block(key, parent, start, packed_ids, text, bytes.fromhex(pending)))
            parent, start = key, chain[-1].stop
        at = [(chain[place].key, kind, n) for place, kind, n in content["checkpoints"]]
        replies = {bytes.fromhex(digest): bytes.fromhex(ids) for digest, ids in content["replies"]}
        return cls(tuple(chain), tuple(Checkpoint.at(*place) for place in at), replies)


def opening_of(messages: Sequence[Any], packed_ids: bytes = b"") -> bytes:
    """Return the hash of the messages before the first reply, or else of the first ids."""
    first = list(takewhile(lambda message: message.get("role") != "assistant", messages))
    encoded = json.dumps(first, sort_keys=True, default=str).encode() if first else b""
    return blake2b(encoded or packed_ids[: 4 * OPENING_TOKENS], digest_size=KEY_BYTES).digest()


def conversation_key(root: Root, opening: bytes) -> bytes:
    """Return the key of a conversation's object."""
    return blake2b(root.key + opening, digest_size=KEY_BYTES, person=b"kvpersist-turn-1").digest()


def layout_key(root: Root, opening: bytes) -> bytes:
    """Return the key of the object that says in which layout a conversation was put first."""
    return conversation_key(replace(root, layout=""), opening)
