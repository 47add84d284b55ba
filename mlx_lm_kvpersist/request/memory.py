"""One account of the memory beside a model's weights: what is used, promised, and given back.

The pool yields to what runs: it gets what sequences leave, a share of the whole at least. A request
begins when the caches of its prompt fit beside those of all others, at their full length. Bytes are
those of the arrays' shapes. Generation thread, but for `parts`.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from ..cache.geometry.spec import state_arrays, token_arrays
from ..cache.live.packed import GRID
from ..cache.measuring.prefill_memory import CHECKPOINT_EVERY, PrefillMemory
from ..host.answers import BatchMemory
from ..store.block_store import BlockStore
from ..units import show_bytes
from .lookup import Lookup
from .model import LoadedModel

LEAST_BYTES = 128 << 20
"""This much beside the weights is taken in any case."""
MOST_RESERVE_BYTES = 4 << 30
"""An eighth of a device's memory is left to the system and other programs, this much at most."""
POOL_SHARE = 8
"""Sequences leave the pool one part in so many: turns wait there until they are written."""
ROOM = 1024
"""Tokens of spare room that a sequence's buffers may have, beyond its last."""
GROWTH = 512
"""Tokens that a sequence that begins must have room for, beside the others, to go on."""
MOST_PASSED = 8
"""A request that waits for memory lets so many pass that need less; then it is its turn."""
_CHUNK = 4096
_RECORD_BYTES = 4096
"""Of a block in RAM beside its arrays: its record, ids and text, and its places in indexes."""
_INDEX_BYTES = 32 << 20
"""SQLite's pages, and a tokenizer's texts."""
LOOK_S = 1.0
"""How often the pressure is looked at."""
RAISED_S = 10.0
_SHARES = {1: 1.0, 2: 0.75, 4: 0.5}
"""What is left of the whole by macOS's levels of memory pressure: normal, warning, critical."""

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Claim:
    """What a request needs to begin: the caches of `n_tokens`.

    `order` is its place among all requests. `is_over` says whether it needs nothing any more.
    `lookup` knows what it restores.
    """

    order: int
    n_tokens: int
    is_over: Callable[[], bool]
    lookup: Lookup | None = None
    n_passed: int = 0
    has_entered: bool = False
    seen: int = -1
    """The state of the account in which there was no room for it."""


class Memory(BatchMemory):
    """The account of one loaded model and of the store.

    `total_bytes` are for all but the weights.
    `refuses`: whether a request is refused where it would have to wait.
    """

    def __init__(
        self,
        total_bytes: int,
        weights_bytes: int,
        store: BlockStore,
        pressure: Pressure,
        *,
        refuses: bool = False,
    ) -> None:
        self.total_bytes, self.weights_bytes, self._store = total_bytes, weights_bytes, store
        self.refuses = refuses
        self._prefill: PrefillMemory | None = None
        self._n_layers = self._most_blocks = 1
        self.live_bytes = 0
        """Of the caches in the batch and of prompts that are computed, when last weighed."""
        self.held_bytes = 0
        """Of turns that wait until it is known how to store them."""
        self._replies: tuple[int, ...] = ()
        self._prompts: tuple[int, ...] = ()
        self._claims: list[Claim] = []
        """Of requests that have begun and were not weighed yet."""
        self.waiting: list[Claim] = []
        """The oldest first."""
        self._n_changes = self._default_unused = 0
        self._windows: list[tuple[int, int]] = []
        self._token_bytes = self._row_bytes = 0
        """Of one token, and of a row besides its tokens."""
        self._pressure, self._level = pressure, 1

    def serve(self, model: LoadedModel) -> None:
        """Count by what a model's caches take from now on. No sequence runs."""
        spec, self._prefill = model.spec, model.speed.memory
        self._n_layers = max(1, len(spec.template))
        self._token_bytes = spec.bytes_per_token
        self._windows = [
            (window, sum(group.bytes_per_token for group in groups))
            for window, groups in spec.sliding.items()
        ]
        states = sum(group.state_bytes for group in spec.recurrent)
        self._row_bytes = states + GRID * spec.newest_bytes
        # Metal ends a process that holds more buffers than this.
        most_buffers = int(mx.device_info().get("resource_limit") or 1 << 62)
        n_arrays = len(list(token_arrays(spec.groups, 1))) + len(list(state_arrays(spec.groups)))
        self._most_blocks = most_buffers * 3 // 4 // max(1, n_arrays)
        self.changed()

    # What sequences take.

    def caches_bytes(self, replies: Sequence[int], prompts: Sequence[int], room: int) -> int:
        """Return the most bytes of the caches of sequences of these lengths, in one batch.

        All rows of a batch are as long as the longest. `room`: tokens that each has beyond its end.
        """
        n_rows = len(replies) + len(prompts)
        if not n_rows:
            return 0
        width = max(*replies, *prompts, 0) + room
        windows = sum(
            n * (n_rows * min(window, width) + len(prompts) * min(CHECKPOINT_EVERY, width))
            for window, n in self._windows
        )
        return n_rows * (width * self._token_bytes + self._row_bytes) + windows

    def step_bytes(self, replies: Sequence[int], prompts: Sequence[int]) -> int:
        """Return the most bytes that a chunk, or a step of the replies, takes beside the caches."""
        prefill = self._prefill
        if prefill is None or not (replies or prompts):
            return 0
        longest = max(*replies, *prompts, 0)
        chunks = [(min(_CHUNK, n, prefill.most_tokens(at)), at) for n in prompts for at in (0, n)]
        peaks = [prefill.peak_bytes(n_tokens, position) for n_tokens, position in chunks]
        n_rows = len(replies) + len(prompts)
        # A batch that a sequence joins is copied, a layer after the other.
        layer = self.caches_bytes(replies, prompts, ROOM) // self._n_layers
        return max(*peaks, int(n_rows * longest * prefill.key_bytes), layer)

    def _needed(self, more: Sequence[int] = (), room: int = ROOM) -> int:
        """Return what all that runs, and `more` prompts, may need until they reply."""
        self._claims = [one for one in self._claims if not one.is_over()]
        prompts = [*self._prompts, *(one.n_tokens for one in self._claims), *more]
        caches = self.caches_bytes(self._replies, prompts, room)
        return caches + self.step_bytes(self._replies, prompts)

    @property
    def _usable_bytes(self) -> int:
        own = self.held_bytes + _INDEX_BYTES + _RECORD_BYTES * len(self._store.pool)
        return self._whole_bytes - own

    @property
    def _whole_bytes(self) -> int:
        return int(self.total_bytes * _SHARES[self._level])

    @property
    def pool_bytes(self) -> int:
        """Bytes that the pool has at least, and turns before it is known how to store them."""
        return min(self._whole_bytes // POOL_SHARE, self._store.limits.max_ram_bytes)

    def _settle(self) -> None:
        """Give the pool, and MLX's buffer cache, what is left."""
        self._level = self._pressure.level
        left = self._usable_bytes - self._needed()
        pool = self._store.pool
        self._store.resize(max(self.pool_bytes, min(left, self._store.limits.max_ram_bytes)))
        if (n_more := len(pool) - self._most_blocks) > 0:
            pool.release(pool.n_bytes * n_more // len(pool) + 1)
        least = self._prefill.limit_bytes if self._prefill is not None else 0
        unused = max(least, left - pool.n_bytes)
        before = mx.set_cache_limit(unused)
        self._default_unused = self._default_unused or before
        if unused > self._default_unused:
            mx.set_cache_limit(self._default_unused)
        if mx.get_cache_memory() > unused or self._level > 1:
            mx.clear_cache()

    # Requests that begin.

    def admits(self, claim: Claim) -> bool:
        """Tell whether a request may begin, and promise it what it needs.

        The oldest goes first. Those that need less may pass it a few times.
        """
        if claim in self._claims:
            return True
        if claim not in self.waiting:
            self.waiting = [one for one in self.waiting if not one.is_over()]
            self.waiting = sorted([*self.waiting, claim], key=lambda one: one.order)
        state = self._n_changes
        if claim.seen == state:
            return False
        ahead = [one for one in self.waiting[: self.waiting.index(claim)] if not one.is_over()]
        is_late = any(one.n_passed >= MOST_PASSED for one in ahead)
        if is_late or not self._makes_room(claim):
            claim.seen = state
            return False
        for one in ahead:
            one.n_passed += 1
        self.enters(claim, has_entered=False)
        return True

    def _makes_room(self, claim: Claim) -> bool:
        left = self._usable_bytes - self._needed([claim.n_tokens], ROOM + GROWTH)
        if left < self.pool_bytes:
            return False
        held = claim.lookup.hold() if claim.lookup is not None else 0
        if held > left and claim.lookup is not None:
            claim.lookup.let_go()
        return held <= left

    def enters(self, claim: Claim, *, has_entered: bool = True) -> None:
        """Count a request as begun, whether there is room for it or not: alone it always begins."""
        claim.has_entered = has_entered
        if claim in self.waiting:
            self.waiting.remove(claim)
        if claim not in self._claims:
            if claim.lookup is not None:
                claim.lookup.hold()
            self._claims.append(claim)
            self.changed()

    def changed(self) -> None:
        """Give out anew what is left, and let those that wait try again."""
        self._n_changes += 1
        self._settle()

    # What runs.

    def weigh(self, replies: Sequence[int], prompts: Sequence[int], n_bytes: int) -> bool:
        self._replies, self._prompts, self.live_bytes = tuple(replies), tuple(prompts), n_bytes
        self._claims = [one for one in self._claims if not one.has_entered]
        self.changed()
        return self._needed() + self.pool_bytes <= self._usable_bytes

    def ended(self) -> None:
        """Nothing runs any more."""
        self.weigh((), (), 0)

    def idle(self) -> None:
        """Follow the pressure while nothing runs."""
        if self._level != self._pressure.level:
            self.changed()

    def parts(self) -> dict[str, int]:
        """Return what is used and promised, in bytes, and how many requests wait. Any thread."""
        store = self._store
        return {
            "total": self.total_bytes,
            "weights": self.weights_bytes,
            "caches": self.live_bytes,
            "restored": sum(
                one.lookup.restored_bytes for one in list(self._claims) if one.lookup is not None
            ),
            "pool": store.pool.n_bytes,
            "held": self.held_bytes,
            "records": _INDEX_BYTES + _RECORD_BYTES * len(store.pool),
            "active": mx.get_active_memory(),
            "unused": mx.get_cache_memory(),
            "waiting": len(self.waiting),
            "pressure": self._level,
        }

    def __str__(self) -> str:
        chunk = self._prefill.limit_bytes if self._prefill is not None else 0
        return (
            f"{show_bytes(self.total_bytes)} of memory beside the model's "
            f"{show_bytes(self.weights_bytes)}: up to "
            f"{show_bytes(self._store.limits.max_ram_bytes)} for conversations that do not run, "
            f"up to {show_bytes(chunk)} for a chunk of a prompt, "
            f"{show_bytes(self._token_bytes)} for each token that runs"
        )


class Pressure:
    """How much memory the rest of the machine leaves: macOS's level of pressure.

    A thread of its own looks at it. `raised` is for tests: it says for a while that it is critical.
    """

    def __init__(self) -> None:
        self.level = 1
        """1 is normal, 2 a warning, 4 critical."""
        self._raised_until_s = 0.0

    def watch(self) -> None:
        """Begin to look, and take SIGUSR2 for critical pressure. Main thread."""
        if hasattr(signal, "SIGUSR2") and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGUSR2, self.raised)
        if sys.platform == "darwin":
            threading.Thread(target=self._watch, name="kvpersist-pressure", daemon=True).start()

    def raised(self, *received: object) -> None:
        """Take the pressure for critical for some seconds."""
        self._raised_until_s, self.level = time.monotonic() + RAISED_S, 4
        clock = threading.Timer(RAISED_S, self._look)
        clock.daemon = True
        clock.start()

    def _watch(self) -> None:
        while True:
            self._look()
            time.sleep(LOOK_S)

    def _look(self) -> None:
        is_raised = time.monotonic() < self._raised_until_s
        self.level = 4 if is_raised else _system_level()


def _system_level() -> int:
    """Return `kern.memorystatus_vm_pressure_level` of macOS: 1, 2 or 4; 1 elsewhere."""
    if sys.platform != "darwin":
        return 1
    level, size = ctypes.c_int(1), ctypes.c_size_t(4)
    name = b"kern.memorystatus_vm_pressure_level"
    libc = ctypes.CDLL(None)
    failed = libc.sysctlbyname(name, ctypes.byref(level), ctypes.byref(size), None, 0)
    return level.value if not failed and level.value in _SHARES else 1


def weights_bytes(*models: Any) -> int:
    """Return the bytes of all parameters of these models; None stands for no model."""
    weights = (tree_flatten(model.parameters()) for model in models if model is not None)
    return sum(int(array.nbytes) for arrays in weights for _, array in arrays)


def total_bytes(asked: int | None, n_weights: int) -> int:
    """Return the bytes for all but a model's weights: as asked, else what the device leaves.

    A part of that is left to others. The least that works is taken, whatever the device says:
    stock would serve the model, too.
    """
    if asked is not None:
        return asked
    offered = offered_bytes()
    left = offered - n_weights - min(offered // 8, MOST_RESERVE_BYTES)
    if left < LEAST_BYTES:
        logger.warning(
            "kvpersist: the model's %s leave too little of the device's %s; %s more are used",
            *map(show_bytes, (n_weights, offered, LEAST_BYTES)),
        )
    return max(left, LEAST_BYTES)


def offered_bytes() -> int:
    """Return the memory that this process may have on its device, with what it has already.

    Metal: the recommended working set. CUDA: what is free. Else the machine's available memory,
    within the limits of its cgroups.
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
    """Yield what each limit on this process' control group leaves (cgroup v2, and v1)."""
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
        for one in (folder, *folder.parents):
            try:
                most = (one / limit).read_text().strip()
                if most != "max":
                    yield max(0, int(most) - _fields(one / "memory.stat").get(used, 0))
            except (OSError, ValueError):
                pass  # in a container the group's own place may not be there, its root is
            if one == top:
                break


def _fields(path: Path) -> dict[str, int]:
    """Return the numbers of a file with a name and a number on each line."""
    try:
        lines = (line.split() for line in path.read_text().splitlines())
        return {line[0]: int(line[1]) for line in lines if len(line) > 1 and line[1].isdigit()}
    except OSError:
        return {}
