"""A shared store's objects by key: encrypted, named, checked and counted. Any thread.

A damaged object is a miss, and is replaced when this server has its content. A conversation's
object is named after the first messages. It has the newest chain, and remembered replies.
"""

from __future__ import annotations

import json
import logging
import math
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from itertools import takewhile
from typing import Any, TypeVar

from ..block import KEY_BYTES, Block, Checkpoint, Root, block_key
from ..errors import BlockCorrupt, Failures, NoAnswer, StoreError, StoreFormatError
from .files import MALFORMED, read_content
from .folder import OBJECTS, Encryption
from .objects import Objects, TimedObjects
from .records import SHARED, KVBlock

logger = logging.getLogger(__name__)

Content = TypeVar("Content")

ASK_AGAIN_S = 86400.0
"""The server asks for an object again after a day, because another server may have pruned it."""
RENEW_S = 3 * 86400.0
"""An object in use is put again after three days, because pruning removes the oldest objects."""
_MAX_LAYOUT_BYTES = 1 << 16
_MAX_KEYS = 50_000
"""The most keys in a table; a full table is cleared."""
MAX_BYTES = 64 << 20
"""The size limit of a conversation's object, compressed or not."""
OPENING_TOKENS = 64
_MAX_REPLIES = 256
_FORMAT = 1


@dataclass(frozen=True)
class Conversation:
    """A chain with its checkpoints, and replies as in `Commit.replies`.

    `note` tells people why the chain is empty, if the reason is known.
    """

    chain: tuple[Block, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()
    replies: Mapping[bytes, bytes] = field(default_factory=dict)
    note: str = ""

    def packed(self) -> bytes:
        """Return compressed JSON; if there are too many replies, it has only the newest.

        Raises StoreError if the JSON is too long even without replies.
        """
        place = {block.key: n for n, block in enumerate(self.chain)}
        replies = [[digest.hex(), ids.hex()] for digest, ids in self.replies.items()]
        newest = replies[-_MAX_REPLIES:]
        content = {
            "format": _FORMAT,
            "blocks": [
                [block.packed_ids.hex(), block.text, block.pending.hex()] for block in self.chain
            ],
            "checkpoints": [[place[o.block], o.kind, o.n_tokens] for o in self.checkpoints],
            "replies": newest,
        }
        while len(encoded := json.dumps(content).encode()) > MAX_BYTES:
            if not newest:
                raise StoreError("a conversation is too long for the shared store")
            del newest[: (len(newest) + 1) // 2]
        return zlib.compress(encoded)

    @classmethod
    def unpacked(cls, packed: bytes, root: Root) -> Conversation:
        """Read `packed`; the result is empty if the format differs.

        Raises zlib.error or one of MALFORMED.
        """
        content = json.loads(zlib.decompressobj().decompress(packed, MAX_BYTES))
        if content["format"] != _FORMAT:
            return cls()
        chain: list[Block] = []
        parent, start = root.key, 0
        for ids, text, pending in content["blocks"]:
            packed_ids = bytes.fromhex(ids)
            key = block_key(parent, packed_ids)
            text.encode()  # raises for text that SQLite refuses
            chain.append(Block(key, parent, start, packed_ids, text, bytes.fromhex(pending)))
            parent, start = key, chain[-1].stop
        at = [(chain[place].key, kind, n) for place, kind, n in content["checkpoints"]]
        replies = {bytes.fromhex(digest): bytes.fromhex(ids) for digest, ids in content["replies"]}
        return cls(tuple(chain), tuple(Checkpoint.at(*place) for place in at), replies)


def opening_of(messages: Sequence[Any], packed_ids: bytes = b"") -> bytes:
    """Hash the messages before the first reply; if there are none, hash the first ids."""
    first = list(takewhile(lambda message: message.get("role") != "assistant", messages))
    encoded = json.dumps(first, sort_keys=True, default=str).encode() if first else b""
    return blake2b(encoded or packed_ids[: 4 * OPENING_TOKENS], digest_size=KEY_BYTES).digest()


def conversation_key(root: Root, opening: bytes) -> bytes:
    return blake2b(root.key + opening, digest_size=KEY_BYTES, person=b"kvpersist-turn-1").digest()


def layout_key(root: Root, opening: bytes) -> bytes:
    """Return the key of the object that says in which layout a conversation was put first."""
    return conversation_key(replace(root, layout=""), opening)


@dataclass
class Breaker:
    """Whether a store may be asked and, if not, why."""

    what: str
    failures: Failures
    failed_with: str = ""

    def failed(self, error: object) -> None:
        self.failed_with = str(error) or repr(error)
        kind = f"the shared store cannot be {self.what}: …"
        message = "the shared store cannot be %s: %s; serving continues"
        self.failures.add(message, self.what, self.failed_with, kind=kind)

    def worked(self) -> None:
        if self.failed_with:
            logger.info("kvpersist: the shared store is %s again", self.what)
        self.failed_with = ""


class SharedObjects:
    """Reads and writes objects; a missing object is a miss. Raises what `TimedObjects` raises."""

    def __init__(self, objects: Objects, encryption: Encryption, failures: Failures) -> None:
        self._objects, self.objects = objects, TimedObjects(objects)
        self._encryption, self.failures = encryption, failures
        self.counts = dict.fromkeys(
            ("written", "written_bytes", "fetched", "fetched_bytes", "refused", "not_written"), 0
        )
        """Numbers of objects and bytes by event; "refused" objects failed a check."""
        self.reads = Breaker("read", self.failures)
        self.writes = Breaker("written", self.failures)
        self.seen_s: dict[bytes, float] = {}
        """When objects were last known to exist, by the wall clock: other servers may remove
        objects while this machine sleeps."""
        self._bad: set[bytes] = set()
        if self.objects.is_hanging:
            self.reads.failed("it does not answer")

    def answers(self) -> bool:
        """Request an object that does not exist; return whether the store answers."""
        self.objects.try_again()
        try:
            self._age_s(bytes(KEY_BYTES))
        except Exception as error:
            self.reads.failed(error)
            return False
        self.reads.worked()
        return True

    def _age_s(self, key: bytes) -> float | None:
        return self.objects.ask(self._objects.age_s, self.path(key))

    @property
    def failed_with(self) -> str:
        """Why nothing is fetched or put now, or ""."""
        return self.reads.failed_with or self.writes.failed_with

    def path(self, key: bytes) -> str:
        name = self._encryption.object_name(key)
        return f"{OBJECTS}/{name[:2]}/{name}"

    # Get.

    def block(self, key: bytes, root: Root, max_bytes: int) -> KVBlock | None:
        """Return a block or checkpoint with its arrays; None if it is missing or damaged."""

        def read(content: bytes) -> KVBlock:
            record, its_root, arrays = read_content(content, f"object {key.hex()}")
            if record.key != key or its_root.key != root.key:
                raise BlockCorrupt(f"object {key.hex()} contains another record, {record}")
            self.counts["fetched"] += 1
            self.counts["fetched_bytes"] += len(content)
            self.saw(key)
            return replace(KVBlock.of(record, arrays), tier=SHARED)

        return self._get(key, max_bytes, read)

    def conversation(self, root: Root, opening: bytes) -> Conversation:
        unpacked = partial(Conversation.unpacked, root=root)
        found = self._get(conversation_key(root, opening), MAX_BYTES, unpacked)
        if found is not None:
            return found
        layout = self._get(layout_key(root, opening), _MAX_LAYOUT_BYTES, bytes)
        if layout is None or layout == root.layout.encode():
            return Conversation()
        precision = layout.decode("utf-8", "replace")
        note = f"the shared store has this conversation in another KV precision ({precision})"
        return Conversation(note=note)

    def _get(self, key: bytes, max_bytes: int, read: Callable[[bytes], Content]) -> Content | None:
        """Return what `read` returns for an object's content; None if it is missing or damaged."""
        try:
            content = self.objects.ask(self._objects.get, self.path(key), max_bytes)
            return read(self._encryption.decrypt(content, key))
        except (FileNotFoundError, StoreFormatError):
            return None
        except NoAnswer as error:
            self.reads.failed(error)
            raise
        except (StoreError, zlib.error, *MALFORMED) as error:
            self.failures.add("the shared store has a damaged object: %s", error)
            self.counts["refused"] += 1
            self.forget(key, is_bad=True)
            return None

    def forget(self, key: bytes, *, is_bad: bool) -> None:
        """Treat an object as missing. If it `is_bad`, it will be replaced."""
        self.seen_s.pop(key, None)
        if is_bad:
            if len(self._bad) >= _MAX_KEYS:
                self._bad.clear()  # bad objects are refused again
            self._bad.add(key)

    # Put.

    def saw(self, key: bytes) -> None:
        if len(self.seen_s) >= _MAX_KEYS:
            self.seen_s.clear()  # the objects are asked for again
        self.seen_s[key] = time.time()

    def is_seen(self, key: bytes) -> bool:
        seen_s = self.seen_s.get(key, -math.inf)
        return 0 <= time.time() - seen_s < ASK_AGAIN_S

    def lacks(self, key: bytes) -> bool:
        """Say whether an object should be put: it is missing, is damaged or was put long ago."""
        if self.is_seen(key):
            return False
        age_s = None if key in self._bad else self._age_s(key)
        if age_s is None or age_s > RENEW_S:
            return True
        self.saw(key)
        return False

    def put(self, key: bytes, content: bytes) -> None:
        encrypted = self._encryption.encrypt(content, key)
        self.objects.ask(self._objects.put, self.path(key), encrypted)
        self.counts["written"] += 1
        self.counts["written_bytes"] += len(content)
        self._bad.discard(key)
        self.saw(key)
