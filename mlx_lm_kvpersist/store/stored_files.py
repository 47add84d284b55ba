"""The files of a store with their rows: what they take, and how they are removed or set aside."""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path

from ..block import Block, Checkpoint, Root
from ..errors import StoreError
from ..units import show_bytes
from .files import FOLDERS, block_path
from .folder import (
    INDEX_FILES,
    check_place,
    make_private,
    move,
    new_file,
    own_bytes,
    own_files,
    remove,
    whole_file,
)
from .index import Forgotten, Index, Session
from .lock import StoreLock, staged_bytes, sweep_staged
from .rebuild import rebuild_index
from .records import Gone, StoreLimits, sidecar, sidecar_path

logger = logging.getLogger(__name__)

_MAX_GONE = 10_000
_INDEX_RESERVE_BYTES = 768 << 10


class StoredFiles:
    """What a store's folder holds, files and rows together, within limits.

    `lock` is held while either changes.
    """

    def __init__(self, folder: Path, index: Index, lock: StoreLock, limits: StoreLimits) -> None:
        self.folder = folder
        self.index = index
        self.sealing = index.sealing
        self.lock = lock
        self.limits = limits
        self.n_evicted = 0
        """Blocks and checkpoints that this process removed to make room."""
        self.forgotten: Callable[[Collection[bytes]], None] = lambda keys: None
        """Called with the keys of blocks and checkpoints that are no longer on disk."""
        self.asked_again_tokens = 0
        """Tokens of evicted blocks that were written anew."""
        self.gone: OrderedDict[bytes, Gone] = OrderedDict()
        """Why blocks and checkpoints went that this process removed lately. Any thread."""

    def path_of(self, key: bytes, name: str = Block.folder) -> Path:
        """Return where the file of a block is; for another `name` of a folder, what is there."""
        return block_path(self.folder, key, name, self.sealing)

    def used_bytes(self) -> int:
        """Return the size of the store's files, and of those that are announced."""
        totals = self.index.totals()
        others = own_bytes(self.folder, *INDEX_FILES, "quarantine")
        return totals.n_bytes + totals.sidecar_bytes + others + staged_bytes(self.folder)[0]

    def free_bytes(self) -> int:
        """Return the free space of the volume, less what is announced and not yet written."""
        announced, written = staged_bytes(self.folder)
        return shutil.disk_usage(self.folder).free - (announced - written)

    def __str__(self) -> str:
        free, limits = self.free_bytes(), self.limits
        used = f"{show_bytes(self.used_bytes())} of {show_bytes(limits.max_disk_bytes)}"
        text = f"{self.folder} ({used}, {show_bytes(free)} free"
        if free < limits.min_free_bytes:
            floor = show_bytes(limits.min_free_bytes)
            text += f"; less than the {floor} of --kvpersist-min-free, so nothing new is stored"
        return f"{text})"

    def forget(self, key: bytes, why: Gone | None = None) -> Forgotten:
        """Remove a checkpoint, or a block with its checkpoints and the sessions that end in it."""
        with self.lock.held():
            went = self.index.forget(key)
            for session_id in went.sessions:
                self.remove_sidecar(session_id)
            remove(self.folder, self.path_of(key))
            keys = {key, *went.checkpoints}
            self.forgotten(keys)
            for one in keys:
                remove(self.folder, self.path_of(one, Checkpoint.folder))
                if why is not None:
                    self.gone[one] = why
            while len(self.gone) > _MAX_GONE:
                self.gone.popitem(last=False)
            return went

    def forget_missing(self, key: bytes) -> None:
        """Forget a block or checkpoint, unless its file is there after all."""
        with self.lock.held():
            if not any(self.path_of(key, name).exists() for name in FOLDERS):
                self.forget(key)

    def quarantine(self, key: bytes, reason: str) -> None:
        """Move what failed a check aside. Blocks that follow it are no longer reached."""
        with self.lock.held():
            for name in FOLDERS:
                self._set_aside(self.path_of(key, name), key, reason)
            self.forget(key, Gone.QUARANTINED)

    def _set_aside(self, path: Path, key: bytes, reason: str) -> None:
        """Move the file of a block or checkpoint to quarantine, with a sidecar, if it is there."""
        if not path.exists():
            return
        target = self.folder / "quarantine" / f"{path.stem}-{time.time_ns()}.safetensors"
        sidecar = target.with_suffix(".json")
        try:
            with new_file(sidecar) as file:
                about = {"key": key.hex(), "reason": reason, "time": time.time()}
                file.write(self.sealing.seal(json.dumps(about).encode(), key))
            move(self.folder, path, target)
        except (OSError, StoreError) as error:
            # A file that cannot be kept is removed: it must not stand in the way of a whole one.
            logger.warning("%s is not kept aside: %s", path.name, error)
            remove(self.folder, sidecar)
            remove(self.folder, path)

    @property
    def reserve_bytes(self) -> int:
        """Room for the index and its log to grow by while a turn is saved."""
        return min(_INDEX_RESERVE_BYTES, self.limits.max_disk_bytes // 4)

    def make_room(
        self, n_bytes: int, keep: Collection[bytes] = (), root: Root | None = None
    ) -> bool:
        """Evict until `n_bytes` more, of a root, fit; return False if they cannot.

        Quarantined files go first, then the least recently used leaves and checkpoints. A model
        that has more than its share loses its own. Pinned sessions and the keys in `keep` stay.
        """
        n_bytes += self.reserve_bytes if n_bytes else 0
        if n_bytes > self.limits.max_disk_bytes:
            return False
        with self.lock.held():
            too_much = self._excess(n_bytes)
            if too_much > 0:
                for path in own_files(self.folder, "quarantine"):
                    remove(self.folder, path)
                self.index.database.empty_log()
                too_much = self._excess(n_bytes)
            if too_much <= 0:
                return True
            pinned = self.index.pinned_blocks()
            model, over_share = self._over_share(n_bytes, root, too_much)
            first = {one: self._first(one, keep, pinned) for one in self.index.models()}
            while too_much > 0:
                victims = {one: victim for one, victim in first.items() if victim is not None}
                if not victims:
                    self.index.database.empty_log()  # the rows of what went take room no longer
                    return self._excess(n_bytes) <= 0
                has_own = over_share > 0 and model in victims
                of = model if has_own else min(victims, key=victims.__getitem__)
                *_, key, _ = victims[of]
                went = self.forget(key, Gone.EVICTED)
                first[of] = self._first(of, keep, pinned)
                self.n_evicted += len({key, *went.checkpoints})
                too_much -= went.n_bytes
                over_share -= went.n_bytes
                if too_much <= 0:
                    # Removing rows makes the index's log longer.
                    self.index.database.empty_log()
                    too_much = self._excess(n_bytes)
        return True

    def _over_share(self, n_bytes: int, root: Root | None, too_much: int) -> tuple[str, float]:
        """Return the model that has most, and what it has above its share, in bytes.

        The share is one of what the store can have: other files may have filled the volume.
        """
        sizes = Counter({root.fingerprint: n_bytes} if root is not None else {})
        for one, totals in self.index.roots():
            sizes[one.fingerprint] += totals.n_bytes
        if len(sizes) < 2:
            return "", 0
        ((model, most),) = sizes.most_common(1)
        room = self.used_bytes() + n_bytes - too_much
        return model, most - self.limits.model_share * room

    def _first(
        self, model: str, keep: Collection[bytes], pinned: Collection[bytes]
    ) -> tuple[float, bool, int, bytes, bytes] | None:
        """Return what of a model goes first, as `Index.unused` does.

        One at a time: when a leaf goes, its parent may be the next.
        """
        for victim in self.index.unused(model):
            _, is_checkpoint, _, key, block = victim
            if key not in keep and not (is_checkpoint and block in pinned):
                return victim
        return None

    def _excess(self, n_bytes: int) -> int:
        """Return how many bytes must go before `n_bytes` more may come."""
        over_budget = self.used_bytes() + n_bytes - self.limits.max_disk_bytes
        if not self.limits.min_free_bytes:
            return over_budget
        return max(over_budget, self.limits.min_free_bytes + n_bytes - self.free_bytes())

    def remove_session(self, session: Session) -> list[bytes]:
        """Forget a session and the blocks that no other session needs; return their keys.

        Also those that a draft model has of the same tokens.
        """
        removed = []
        with self.lock.held():
            chain = [block for block, _ in self.index.chain(session.leaf)]
            roots = {root.key: root for root, _ in self.index.roots()}
            own = roots.pop(session.root, None)
            others = [root for root in roots.values() if own and own.shares_tenant(root)]
            self.index.remove_session(session.id)
            self.remove_sidecar(session.id)
            for blocks in (chain, *(self._same_tokens(chain, root) for root in others)):
                for block in reversed(blocks):
                    key = block.key
                    if self.index.sessions_at(key) or self.index.children(key, limit=1):
                        break
                    self.forget(key)
                    removed.append(key)
            self.index.database.empty_log()
        return removed

    def _same_tokens(self, chain: Sequence[Block], root: Root) -> list[Block]:
        """Return the blocks below another root of a chain's tokens, or of the first of them."""
        found: list[Block] = []
        for block in chain:
            parent = found[-1].key if found else root.key
            there = self.index.children(parent, block.packed_ids)
            its = [one for one in there if block.packed_ids.startswith(one.packed_ids)]
            if not its:
                break
            found.append(max(its, key=lambda one: one.n_tokens))
        return found

    def sweep(self) -> int:
        """Bring files and index in line after a crash; return how many of either were removed.

        A file without a row was moved by a turn that was never committed; a row without a file
        lost it; a block without its parent, or a checkpoint without its block, is never reached.
        """
        with self.lock.held():
            n_swept = sweep_staged(self.folder)
            if self.index.faults():
                # Or what its rows do not tell would be removed.
                rebuild_index(self.folder, self.sealing)
            for name in FOLDERS:
                known, present = self.index.keys(name), set[bytes]()
                for path in own_files(self.folder, name):
                    if (key := self.sealing.key_of(path.stem)) in known:
                        present.add(key)
                    else:
                        n_swept += remove(self.folder, path)
                for key in known - present:
                    self.forget(key)
                    n_swept += 1
            for key in self.index.unreachable():
                self.forget(key)
                n_swept += 1
            self.index.state.forget_lost_notes()
            sessions = {f"{session.id}.json" for session in self.index.sessions()}
            for path in own_files(self.folder, "sessions"):
                if path.name not in sessions:
                    n_swept += remove(self.folder, path)
            return n_swept

    def write_sidecar(self, session: Session) -> None:
        if content := sidecar(session, self.sealing):
            path = sidecar_path(self.folder, session.id)
            make_private(path.parent)
            check_place(self.folder, path)
            with whole_file(path) as file:
                file.write(content)

    def remove_sidecar(self, session_id: str) -> None:
        remove(self.folder, sidecar_path(self.folder, session_id))

    def set_pinned(self, session: Session, pinned: bool) -> Session:
        """Pin a session, so that it is never removed to make room, or let it go again.

        Raises StoreError when it was removed meanwhile.
        """
        with self.lock.held():
            current = self.index.session(session.id)  # another process may have moved its leaf
            if current is None:
                raise StoreError(f"session {session.id} was removed meanwhile")
            changed = replace(current, pinned=pinned)
            self.write_sidecar(changed)
            self.index.put_session(changed)
            if not pinned and changed.name is None:
                self.remove_sidecar(changed.id)
            return changed
