"""The account of all memory except a model's weights: caches, claims of requests, and the pool.

The pool gets the memory that sequences do not use, and at least a share of the total. A request
begins if memory has room for its whole prompt, in addition to all sequences that have begun. A
request that is alone always begins. The option `--kvpersist-memory` or the device determines the
account's size (`total_bytes`), and memory pressure reduces it. Generation thread, except for
`parts`.
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ..cache.measuring.prefill_memory import SequenceMemory
from ..store.block_store import BlockStore
from ..units import show_bytes
from .lookup import Lookup
from .model import LoadedModel

LEAST_BYTES = 128 << 20
"""The smallest size of the account, even if the device offers less."""
MOST_RESERVE_BYTES = 4 << 30
"""An eighth of the device's memory is left to other programs, but at most this many bytes."""
POOL_SHARE = 8
"""An eighth of the account is reserved for the pool, where turns wait until they are written."""
MORE = 64
"""The account counts this number of further tokens for each sequence: the tokens of steps before
the next `weigh`, and draft tokens."""
GROWTH = 512
"""A sequence begins only if memory also has room for this number of further tokens of each running
sequence and of the new sequence."""
MOST_PASSED = 8
"""At most this number of smaller requests may begin before an older request that waits."""
NEEDED_ABOVE = 0.5
"""Weights above this share of the device's recommended memory are wired (docs/mac.md)."""
_RECORD_BYTES = 4096
"""The bytes of a block in RAM without its arrays: record, ids, text, entries in indexes."""
_INDEX_BYTES = 32 << 20
"""The bytes of SQLite's pages and of a tokenizer's texts."""
NORMAL, WARNING, CRITICAL = 1, 2, 4
"""Levels of pressure, as macOS numbers them."""
_SHARES = {NORMAL: 1.0, WARNING: 0.75, CRITICAL: 0.5}
"""The share of the account that may be used at each level of pressure."""

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Claim:
    """The memory that a request needs to begin: the caches of `n_tokens`.

    `is_over()`: the request has ended or its client has left. `lookup` pins the blocks to restore.
    """

    order: int
    """An older request has a smaller number."""
    n_tokens: int
    is_over: Callable[[], bool]
    lookup: Lookup | None = None
    n_passed: int = 0
    """How many younger requests have begun while this request waited for memory."""
    has_entered: bool = False
    """Whether the request has entered (`ServedRequest.enter`). If so, the next `weigh` counts the
    request's sequence, and the claim ends."""
    n_changes: int = -1
    """The account's `_n_changes` when the claim was last checked."""


class Memory:
    """The account of the `total_bytes` that a model and the store may use besides the weights.

    `refuses`: whether a request that would have to wait is refused instead.
    """

    def __init__(
        self,
        total_bytes: int,
        weights_bytes: int,
        store: BlockStore,
        model: LoadedModel,
        *,
        refuses: bool = False,
    ) -> None:
        self.total_bytes, self.weights_bytes, self._store = total_bytes, weights_bytes, store
        self.refuses = refuses
        self._takes = SequenceMemory.of(model.spec, model.speed.memory)
        if model.draft is not None:
            self._takes = self._takes.with_draft(SequenceMemory.of(model.draft.spec, None))
        # Metal ends a process that has more than `most_buffers` buffers.
        most_buffers = int(mx.device_info().get("resource_limit") or 1 << 62)
        self._most_blocks = most_buffers * 3 // 4 // self._takes.n_arrays
        self.live_bytes = 0
        """Bytes of the caches of replies and of prompts, at the last update."""
        self._replies: tuple[int, ...] = ()
        self._prompts: tuple[int, ...] = ()
        self._claims: list[Claim] = []
        """The claims of requests that have begun, until `weigh` records their sequences."""
        self.waiting: list[Claim] = []
        """The oldest come first."""
        self._n_changes = 0
        self._pressure_level, self._level = pressure_level, NORMAL
        self._stock_limit_bytes = mx.set_memory_limit(weights_bytes + total_bytes)
        self.changed()

    def close(self) -> None:
        mx.set_memory_limit(self._stock_limit_bytes)

    def _needed(self, prompts: Sequence[int] = (), more: int = MORE) -> int:
        """Return the bytes for all sequences and `prompts`, each with `more` further tokens."""
        self._claims = [claim for claim in self._claims if not claim.is_over()]
        prompts = [*self._prompts, *(claim.n_tokens for claim in self._claims), *prompts]
        caches = self._takes.caches_bytes(self._replies, prompts, more)
        return caches + self._takes.step_bytes(self._replies, prompts, more)

    @property
    def _whole_bytes(self) -> int:
        return int(self.total_bytes * _SHARES[self._level])

    @property
    def _records_bytes(self) -> int:
        return _INDEX_BYTES + _RECORD_BYTES * len(self._store.pool)

    @property
    def _usable_bytes(self) -> int:
        return self._whole_bytes - self._records_bytes

    @property
    def pool_bytes(self) -> int:
        """The bytes that sequences cannot take from the pool."""
        return min(self._whole_bytes // POOL_SHARE, self._store.limits.max_ram_bytes)

    def changed(self) -> None:
        """Give the pool the remaining memory, and set MLX's memory limit.

        After this call, `admits` checks waiting requests again.
        """
        self._n_changes += 1
        level, self._level = self._level, self._pressure_level()
        if self._level != level or level != NORMAL:
            mx.clear_cache()
        needed, pool = self._needed(), self._store.pool
        left = min(self._usable_bytes - needed, self._store.limits.max_ram_bytes)
        idle_bytes = max(self.pool_bytes, left)
        self._store.resize(idle_bytes)
        if (n_more := len(pool) - self._most_blocks) > 0:
            pool.release(pool.n_bytes * n_more // len(pool) + 1)
        # Above its limit, MLX frees cached buffers and waits for the device between operations.
        # The limit is raised for a request that runs alone and needs more than the account.
        mx.set_memory_limit(self.weights_bytes + max(self._whole_bytes, needed + idle_bytes))

    # Requests that have not begun.

    def admits(self, claim: Claim) -> bool:
        """Return whether memory has room for a request; if so, reserve its memory.

        O(requests), and O(blocks) to pin the blocks to restore.
        """
        if claim in self._claims:
            return True
        if claim.n_changes == self._n_changes:
            return False
        claim.n_changes = self._n_changes
        waiting = [older for older in self.waiting if older is not claim and not older.is_over()]
        self.waiting = sorted([*waiting, claim], key=lambda claim: claim.order)
        ahead = self.waiting[: self.waiting.index(claim)]
        is_late = any(first.n_passed >= MOST_PASSED for first in ahead)
        if is_late or not self._makes_room(claim):
            return False
        for first in ahead:
            first.n_passed += 1
        self.enters(claim, has_entered=False)
        return True

    def _makes_room(self, claim: Claim) -> bool:
        left = self._usable_bytes - self._needed([claim.n_tokens], MORE + GROWTH)
        if left < self.pool_bytes:
            return False
        if claim.lookup is not None:
            claim.lookup.hold()
        # The blocks that requests restore, and blocks that are not written yet, stay in RAM.
        fits = self._store.pool.held_bytes <= left
        if not fits and claim.lookup is not None:
            claim.lookup.let_go()
        return fits

    def enters(self, claim: Claim, *, has_entered: bool = True) -> None:
        """Record that a request begins. A request that is alone begins even if it does not fit."""
        claim.has_entered = has_entered
        if claim in self.waiting:
            self.waiting.remove(claim)
        if claim in self._claims:
            return
        lookup, pool = claim.lookup, self._store.pool
        if lookup is not None:
            lookup.hold()
        self._claims.append(claim)
        self.changed()
        if lookup is not None and pool.n_bytes > pool.max_bytes:
            lookup.let_go()  # the caches need the blocks' memory

    # Running sequences.

    def weigh(self, replies: Sequence[int], prompts: Sequence[int], n_bytes: int | None) -> bool:
        """Record each sequence's number of tokens; return whether memory suffices for all.

        `ModelSupport` describes the arguments.
        """
        if n_bytes is None:
            n_bytes = self._takes.caches_bytes(replies, prompts)
        self._replies, self._prompts, self.live_bytes = tuple(replies), tuple(prompts), n_bytes
        self._claims = [claim for claim in self._claims if not claim.has_entered]
        self.changed()
        return self._needed() + self.pool_bytes <= self._usable_bytes

    def idle(self) -> None:
        """Record that nothing runs, and read the memory pressure."""
        ran = self.live_bytes or self._replies or self._prompts or self._claims
        if ran or self._level != self._pressure_level():
            self.weigh((), (), 0)

    def parts(self) -> dict[str, int]:
        """Return the bytes of each part, the number of waiting requests, the pressure. Any thread.

        The values from "caches" to "unused" are parts of "total".
        """
        lookups = [claim.lookup for claim in list(self._claims) if claim.lookup is not None]
        arrays = {
            "caches": self.live_bytes,
            "restored": sum(lookup.restored_bytes for lookup in lookups),
            "pool": self._store.pool.n_bytes,
        }
        active = mx.get_active_memory()
        return {
            "total": self.total_bytes,
            "weights": self.weights_bytes,
            **arrays,
            "computing": max(0, active - self.weights_bytes - sum(arrays.values())),
            "records": self._records_bytes,
            "unused": mx.get_cache_memory(),
            "active": active,
            "waiting": len(self.waiting),
            "pressure": self._level,
        }

    def __str__(self) -> str:
        total, weights = show_bytes(self.total_bytes), show_bytes(self.weights_bytes)
        token, chunk = show_bytes(self._takes.token_bytes), show_bytes(self._takes.chunk_bytes)
        return (
            f"{total} of memory besides the weights, which take {weights}. Each token of a "
            f"conversation takes {token}, a chunk of a prompt {chunk}"
        )


def weights_bytes(*models: Any) -> int:
    weights = (tree_flatten(model.parameters()) for model in models if model is not None)
    return sum(int(array.nbytes) for arrays in weights for _, array in arrays)


def total_bytes(option: int | None, n_weights: int) -> int:
    """Return the size of the account: `option`, or the device's memory less weights and a reserve.

    The default is at least LEAST_BYTES: like the stock server, serve a model that is too large.
    """
    offered = offered_bytes()
    if option is not None:
        if n_weights + option > offered:
            logger.warning(
                "kvpersist: --kvpersist-memory %s and weights of %s are more than the %s that the "
                "device offers; give less",
                *map(show_bytes, (option, n_weights, offered)),
            )
        return option
    left = offered - n_weights - min(offered // 8, MOST_RESERVE_BYTES)
    if left < LEAST_BYTES:
        logger.warning(
            "kvpersist: the weights take %s, the device offers %s; caches and store get only %s",
            *map(show_bytes, (n_weights, offered, LEAST_BYTES)),
        )
    return max(left, LEAST_BYTES)


def wired_bytes(n_weight_bytes: int, asked_bytes: int) -> tuple[int | None, str]:
    """Return how many bytes macOS may wire (None: mlx-lm's number), and the reason for the log.

    asked_bytes: mlx-lm's number, the device's recommended maximum.
    """
    sizes = f"weights take {show_bytes(n_weight_bytes)} of {show_bytes(asked_bytes)} recommended"
    if n_weight_bytes > NEEDED_ABOVE * asked_bytes:
        return None, f"as stock, up to {show_bytes(asked_bytes)}: {sizes}, more than half"
    return 0, f"off: {sizes}, half or less"


def pressure_level() -> int:
    """Return macOS's level of memory pressure; NORMAL on other systems. Takes microseconds."""
    if sys.platform != "darwin":
        return NORMAL
    level, size = ctypes.c_int(NORMAL), ctypes.c_size_t(4)
    name = b"kern.memorystatus_vm_pressure_level"
    libc = ctypes.CDLL(None)
    failed = libc.sysctlbyname(name, ctypes.byref(level), ctypes.byref(size), None, 0)
    is_known = not failed and level.value in (WARNING, CRITICAL)
    return level.value if is_known else NORMAL


def offered_bytes() -> int:
    """Return the bytes that this process may use on its device, including those in use now.

    Metal: the recommended working set. CUDA: the free memory. Otherwise: the available memory of
    the machine, within the limits of its cgroups.
    """
    info, own = mx.device_info(), mx.get_active_memory() + mx.get_cache_memory()
    if working_set := info.get("max_recommended_working_set_size"):
        return int(working_set)
    if on_device := info.get("free_memory"):
        return int(on_device) + own
    if on_device := info.get("total_memory"):
        return int(on_device)
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    fields = _fields(Path("/proc/meminfo"))
    available = fields["MemAvailable:"] * 1024 if "MemAvailable:" in fields else physical * 3 // 4
    return min([available, *cgroup_bytes()]) + own


def cgroup_bytes(root: Path = Path("/")) -> Iterator[int]:
    """Yield the free bytes of each limit on this process's control group (cgroup v2 and v1)."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mounted = root / "sys/fs/cgroup"
    for line in lines:
        number, controllers, place = line.split(":", 2)
        if number == "0":
            top, limit, used = mounted, "memory.max", "anon"
        elif "memory" in controllers.split(","):
            top, limit, used = mounted / "memory", "memory.limit_in_bytes", "total_rss"
        else:
            continue
        folder = top / place.lstrip("/")
        for group in (folder, *folder.parents):
            try:
                most = (group / limit).read_text().strip()
                if most != "max":
                    yield max(0, int(most) - _fields(group / "memory.stat").get(used, 0))
            except (OSError, ValueError):
                pass  # in a container, the group's path may not exist, but the root exists
            if group == top:
                break


def _fields(path: Path) -> dict[str, int]:
    """Return the numbers by name, from a file with a name and a number on each line."""
    try:
        lines = (line.split() for line in path.read_text().splitlines())
        return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdigit()}
    except OSError:
        return {}
