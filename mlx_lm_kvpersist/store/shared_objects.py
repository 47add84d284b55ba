"""A shared store's objects by key: encrypted, named, checked, counted; left alone if it fails.

A damaged object is a miss, and replaced when this server has its content. Any thread.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from ..block import KEY_BYTES, Root
from ..errors import BlockCorrupt, NoAnswer, StoreError, StoreFormatError
from ..failures import Failures
from .conversation import DAMAGED, MAX_BYTES, Conversation, conversation_key, layout_key
from .encryption import Encryption
from .files import read_content
from .folder import OBJECTS
from .objects import Objects, TimedObjects
from .records import KVBlock
from .tier import SHARED

logger = logging.getLogger(__name__)

ASK_AGAIN_S = 86400.0
"""The server asks for an object again after a day, because another server may have pruned it."""
RENEW_S = 3 * 86400.0
"""What is used is put again after so long, so that pruning removes what is not used."""
_MAX_LAYOUT_BYTES = 1 << 16
_MAX_KEYS = 50_000
"""Most keys in a table; then it begins again."""


@dataclass
class Breaker:
    """Whether a store may be asked, and why not."""

    what: str
    failures: Failures
    failed_with: str = ""

    def failed(self, error: object) -> None:
        self.failed_with = str(error) or repr(error)
        kind = f"the shared store cannot be {self.what}: …"
        message = "the shared store cannot be %s: %s; serving goes on"
        self.failures.add(message, self.what, self.failed_with, kind=kind)

    def worked(self) -> None:
        if self.failed_with:
            logger.info("kvpersist: the shared store is %s again", self.what)
        self.failed_with = ""


class SharedObjects:
    """What a server gets and puts. Raises what `TimedObjects` does, but no FileNotFoundError."""

    def __init__(self, objects: Objects, encryption: Encryption, failures: Failures) -> None:
        self.objects = TimedObjects(objects)
        self._encryption, self.failures = encryption, failures
        self.counts = dict.fromkeys(
            ("written", "written_bytes", "fetched", "fetched_bytes", "refused", "not_written"), 0
        )
        """What has happened; "refused": objects that failed a check."""
        self.reads = Breaker("read", self.failures)
        self.writes = Breaker("written", self.failures)
        self.seen_s: dict[bytes, float] = {}
        """When objects were last known to be there, by the monotonic clock."""
        self._bad: set[bytes] = set()
        if self.objects.is_hanging:
            self.reads.failed("it does not answer")

    def answers(self) -> bool:
        """Ask for a missing object; return whether the store answers."""
        self.objects.try_again()
        try:
            self.objects.age_s(self.path(bytes(KEY_BYTES)))
        except Exception as error:
            self.reads.failed(error)
            return False
        self.reads.worked()
        return True

    @property
    def failed_with(self) -> str:
        """Why nothing is fetched or put now, or ""."""
        return self.reads.failed_with or self.writes.failed_with

    def path(self, key: bytes) -> str:
        """Return the name of an object. All but its hash is the same in every store."""
        name = self._encryption.object_name(key)
        return f"{OBJECTS}/{name[:2]}/{name}"

    # Get.

    def block(self, key: bytes, root: Root, max_bytes: int) -> KVBlock | None:
        """Return a block or checkpoint with its arrays; None if it is missing or damaged."""
        content = self._get(key, max_bytes)
        if content is None:
            return None
        try:
            record, its_root, arrays = read_content(content, f"object {key.hex()}")
            if record.key != key or its_root.key != root.key:
                raise BlockCorrupt(f"object {key.hex()} holds {record} of another place")
        except StoreFormatError:
            return None
        except BlockCorrupt as error:
            self._refuse(key, error)
            return None
        entry = KVBlock.of(record, arrays)
        entry.tier = SHARED
        self.counts["fetched"] += 1
        self.counts["fetched_bytes"] += len(content)
        self.saw(key)
        return entry

    def conversation(self, root: Root, opening: bytes) -> tuple[Conversation, str]:
        """Return the stored part of a conversation, and a note for people, or ""."""
        key = conversation_key(root, opening)
        content = self._get(key, MAX_BYTES)
        if content is not None:
            try:
                return Conversation.unpacked(content, root), ""
            except DAMAGED as error:
                self._refuse(key, error)
        layout_object = self._get(layout_key(root, opening), _MAX_LAYOUT_BYTES)
        layout = root.layout if layout_object is None else layout_object.decode("utf-8", "replace")
        if layout == root.layout:
            return Conversation(), ""
        note = f"the shared store has this conversation in another KV precision ({layout})"
        return Conversation(), note

    def _get(self, key: bytes, max_bytes: int) -> bytes | None:
        try:
            content = self.objects.get(self.path(key), max_bytes)
            return self._encryption.decrypt(content, key)
        except (FileNotFoundError, StoreFormatError):
            return None
        except NoAnswer as error:
            self.reads.failed(error)
            raise
        except (StoreError, ValueError) as error:
            self._refuse(key, error)
            return None

    def _refuse(self, key: bytes, error: Exception) -> None:
        self.failures.add("the shared store has a damaged object: %s", error)
        self.counts["refused"] += 1
        self.forget(key, is_bad=True)

    def forget(self, key: bytes, *, is_bad: bool) -> None:
        """Take an object for missing. If it `is_bad`, it is replaced."""
        self.seen_s.pop(key, None)
        if is_bad:
            if len(self._bad) >= _MAX_KEYS:
                self._bad.clear()  # they are refused again
            self._bad.add(key)

    # Put.

    def saw(self, key: bytes) -> None:
        if len(self.seen_s) >= _MAX_KEYS:
            self.seen_s.clear()  # they are asked for again
        self.seen_s[key] = time.monotonic()

    def is_seen(self, key: bytes) -> bool:
        """Say whether an object was known to be there lately."""
        return time.monotonic() - self.seen_s.get(key, -ASK_AGAIN_S) < ASK_AGAIN_S

    def lacks(self, key: bytes) -> bool:
        """Ask whether an object should be put: it is missing, damaged or was put long ago."""
        if self.is_seen(key):
            return False
        age_s = None if key in self._bad else self.objects.age_s(self.path(key))
        if age_s is None or age_s > RENEW_S:
            return True
        self.saw(key)
        return False

    def put(self, key: bytes, content: bytes) -> None:
        self.objects.put(self.path(key), self._encryption.encrypt(content, key))
        self.counts["written"] += 1
        self.counts["written_bytes"] += len(content)
        self._bad.discard(key)
        self.saw(key)
