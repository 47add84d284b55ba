"""Cut caches into immutable blocks, windows and states, and join these into caches again.

A block holds up to `BLOCK_TOKENS` tokens of the groups whose caches hold every token (kind `FULL`).
Each group has six arrays with its slots stacked: "0.k.weights" [L, H, T, W * bits / 32] uint32,
"0.k.scales" and "0.k.biases" [L, H, T, W / group size] in 16 bits (`scale_dtype`), and the same for
"0.v". W is the size of a head, D, plus its padding. A group in full precision has two arrays, "0.k"
and "0.v" [L, H, T, D]. In an unfinished block, which has fewer tokens, all groups are in full
precision.

In models with windows or states, a block may end at any token, and a short block is stored in the
same form as a full block. A window has the last tokens of a block, for all sliding groups with the
same window size. A state has the recurrent groups' states at the end of a block: "2.0" [L, ...] is
the first array of group 2. A state also has the quantized groups' tokens since the last multiple of
`GRID`, in full precision.

Pieces from disk are copied into buffers a few at a time, while later files are read. Generation
thread.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, takewhile
from typing import Any

import mlx.core as mx

from .geometry.kinds import Fields, GroupKind, kind_of, slots_of
from .geometry.spec import (
    ArrayForm,
    LayerGroup,
    ModelCacheSpec,
    arrays_fit,
    as_computed,
    forms_bytes,
    state_arrays,
    token_arrays,
)
from .live import packed as pk
from .live.attention import least_rows
from .live.packed import GRID

BLOCK_TOKENS = GRID

Arrays = Mapping[str, mx.array]

_BLOCKS_AT_ONCE = 16
"""The most blocks that a GPU cuts or joins together. For a moment, their arrays exist twice."""

_WINDOW_BYTES = 64 << 20
"""Bytes to evaluate together: enough to keep a device busy, but a small share of its memory."""

_ROOM_BYTES = 16 << 20
"""Bytes of buffers to make together. On a CPU, new memory takes up to two milliseconds per MiB."""

_SPARE_SHARE = 16
"""Joining all pieces together may take 1/16 of the cache's bytes in addition to the cache."""

CANARY_TOKENS = 8
"""For each run of this number of tokens, the canary uses the median difference."""
CANARY_TOLERANCE = 0.25
"""The largest accepted difference of recomputed and stored KV, as a share of the norm. Arithmetic
noise is a few percent; KV of other tokens, positions or models differs by about the whole norm."""


def n_cached_tokens(spec: ModelCacheSpec, caches: Sequence[Any]) -> int | None:
    """Return how many tokens all caches have seen; None if all caches are recurrent.

    Raises ValueError if a cache outside all groups is not empty, or if caches disagree in a model
    with windows or states.
    """
    slots = slots_of(caches)
    used = {number for group in spec.groups for number in group.slots}
    for number, slot in enumerate(slots):
        if number not in used and not slot.empty():
            raise ValueError(f"cache {number}, which the model did not use, is not empty")
    counting = [group for group in spec.groups if group.kind is not GroupKind.RECURRENT]
    used_slots = [slots[number] for group in counting for number in group.slots]
    counts = {kind_of(slot).positions(slot)[1] for slot in used_slots}
    if len(counts) > 1 and not spec.any_prefix:
        raise ValueError(f"caches of one sequence have seen {sorted(counts)} tokens")
    return min(counts, default=None)


def first_cached(spec: ModelCacheSpec, window: int, caches: Sequence[Any]) -> int:
    slots = slots_of(caches)
    its_slots = [slots[number] for group in spec.sliding[window] for number in group.slots]
    return max(kind_of(slot).positions(slot)[0] for slot in its_slots)


def copy_state(spec: ModelCacheSpec, caches: Sequence[Any]) -> dict[str, mx.array]:
    """Return the recurrent groups' states, as evaluated copies.

    Raises ValueError if the states have other shapes or dtypes than when the model was probed.
    """
    slots = slots_of(caches)
    state: dict[str, mx.array] = {}
    for group in spec.recurrent:
        lists = [kind_of(slots[slot]).states(slots[slot]) for slot in group.slots]
        for number, form in enumerate(group.states):
            arrays = [states[number] for states in lists]
            if any((array is None) != (form is None) for array in arrays):
                raise ValueError(f"group {group.name} has array {number} in some layers only")
            if form is not None:
                state[f"{group.name}.{number}"] = concatenated(arrays, axis=0)
    mx.eval(state)
    if misfit := arrays_fit(state_arrays(spec.recurrent), state):
        raise ValueError(f"the model's states differ from those it was probed with: {misfit}")
    return state


def copy_newest(
    groups: Sequence[LayerGroup], caches: Sequence[Any], n_tokens: int
) -> dict[str, mx.array]:
    """Return the keys and values of the tokens from the last multiple of `GRID` up to `n_tokens`.

    The arrays are evaluated copies in full precision. The result is {} if `n_tokens` is a multiple
    of `GRID`, or if a cache no longer has all of these tokens in full precision.
    """
    start, slots = n_tokens - n_tokens % GRID, slots_of(caches)
    quantized = [slot for group in groups if group.precision for slot in group.slots]
    firsts = (slots[slot].offset - slots[slot].newest.size() for slot in quantized)
    if start == n_tokens or max(firsts, default=0) > start:
        return {}
    for slot in quantized:
        slots[slot] = slots[slot].as_computed()
    return split(as_computed(groups), slots, [(start, n_tokens)])[0]


def split(
    groups: Sequence[LayerGroup], caches: Sequence[Any], ranges: Sequence[tuple[int, int]]
) -> list[dict[str, mx.array]]:
    """Return the groups' keys and values in each token range [start, stop), as evaluated copies.

    The ranges are in order. Raises ValueError if a range exceeds the tokens of a cache.
    """
    if not ranges:
        return []
    if prefers_few_copies() and len(ranges) > _BLOCKS_AT_ONCE:
        head, tail = ranges[:_BLOCKS_AT_ONCE], ranges[_BLOCKS_AT_ONCE:]
        return [*split(groups, caches, head), *split(groups, caches, tail)]
    slots = slots_of(caches)
    first, last = ranges[0][0], ranges[-1][1]
    stacked: dict[str, list[mx.array]] = {}
    for group in groups:
        for slot in group.slots:
            sides = kind_of(slots[slot]).tokens(slots[slot], first, last)
            for side, fields in zip(("k", "v"), sides, strict=True):
                for name, array in zip(group.array_names[side], fields, strict=True):
                    stacked.setdefault(name, []).append(array)
    if prefers_few_copies():
        stacked = {name: [concatenated(arrays, axis=0)] for name, arrays in stacked.items()}
    blocks: list[dict[str, mx.array]] = []
    waiting_bytes = 0
    for start, stop in ranges:
        at = slice(start - first, stop - first)
        block = {
            name: concatenated([x[:, :, at] for x in arrays], axis=0)
            for name, arrays in stacked.items()
        }
        blocks.append(block)
        waiting_bytes += sum(array.nbytes for array in block.values())
        if waiting_bytes >= _WINDOW_BYTES or stop == last:
            mx.eval(blocks)
            waiting_bytes = 0
    return blocks


def prefers_few_copies() -> bool:
    """Whether two copies in large pieces are faster than one copy in many small pieces.

    On a GPU, starting ten thousand small copies takes longer than the copying itself.
    """
    return bool(mx.default_device().type == mx.DeviceType.gpu)


def copied(array: mx.array) -> mx.array:
    """Return a lazy copy in its own memory; a slice would share the memory of the whole array."""
    return mx.take(array, mx.arange(array.shape[0]), axis=0)


def concatenated(arrays: Sequence[mx.array], axis: int) -> mx.array:
    """Concatenate into new memory. mx.concatenate would not copy a single array."""
    return copied(arrays[0]) if len(arrays) == 1 else mx.concatenate(list(arrays), axis=axis)


@dataclass(frozen=True)
class Piece:
    """Tokens [start, stop) of the arrays of a block or window, counted from the arrays' start."""

    arrays: Arrays
    start: int
    stop: int


class Joiner:
    """A prompt cache of `n_tokens` that is being filled.

    Every slot of kind `FULL` gets its own buffers with room for `n_room` tokens. `windows` maps
    each window to the number of tokens that will be added for it. Pieces must fit the spec
    (`arrays_fit`) and be added in the order of their tokens. If `whole`, all pieces are in RAM, and
    `finish` joins them together, in fewer and larger operations.
    """

    def __init__(
        self,
        spec: ModelCacheSpec,
        n_tokens: int,
        n_room: int,
        windows: Mapping[int, int],
        *,
        whole: bool,
    ) -> None:
        self._spec, self._n_tokens, self._whole = spec, n_tokens, whole
        self._n_at_once = _BLOCKS_AT_ONCE if prefers_few_copies() else 1
        self._buffers: dict[int | None, _Buffers] = {}
        n_held: dict[int | None, int] = {None: n_tokens} if spec.full else {}
        for at, n_cached in (n_held | dict(windows)).items():
            groups = spec.full if at is None else spec.sliding[at]
            forms = list(token_arrays(groups, n_room if at is None else n_cached))
            arrays = {
                name: [] if whole else [mx.zeros((1, *rest), dtype) for _ in range(n_slots)]
                for name, (n_slots, *rest), dtype in forms
            }
            self._buffers[at] = _Buffers(groups, n_cached, forms, arrays)
        self._at_end: Arrays = {}
        self._n_newest = 0

    def make_room(self) -> Iterator[None]:
        """Make the buffers, and yield between them so that steps of replies can run."""
        waiting: list[mx.array] = []
        for buffers in self._buffers.values():
            for array in chain.from_iterable(buffers.arrays.values()):
                waiting.append(array)
                if sum(array.nbytes for array in waiting) >= _ROOM_BYTES:
                    mx.eval(waiting)
                    waiting = []
                    yield
        mx.eval(waiting)

    def add(self, piece: Piece, window: int | None = None) -> None:
        buffers = self._buffers[window]
        buffers.n_added += piece.stop - piece.start
        buffers.waiting.append(piece)
        if not self._whole and len(buffers.waiting) >= self._n_at_once:
            buffers.place()

    def add_unfinished(self, block: Arrays, n_tokens: int) -> None:
        """Add the first tokens of an unfinished block, after all other pieces."""
        packed: dict[str, mx.array] = {}
        for group in self._spec.full:
            sides = group.precision or (None, None)
            for (side, names), quantization in zip(group.array_names.items(), sides, strict=True):
                x = block[f"{group.name}.{side}"]
                fields = pk.zeros(x, x.shape[2], quantization) if quantization else (x,)
                packed.update(zip(names, fields, strict=True))
        self.add(Piece(packed, 0, n_tokens))
        self.add_state(block, n_tokens)

    def add_state(self, state: Arrays, n_newest: int) -> None:
        """Add the states at the last token, and the last `n_newest` tokens in full precision."""
        self._at_end, self._n_newest = state, n_newest

    def finish(self) -> list[Any]:
        """Return the prompt cache, evaluated. Raises ValueError unless all tokens were added."""
        caches = self._spec.make_cache()
        slots = slots_of(caches)
        for buffers in self._buffers.values():
            if buffers.n_added != buffers.n_tokens:
                raise ValueError(
                    f"{buffers.n_added} tokens where there should be {buffers.n_tokens}"
                )
            if buffers.waiting:
                buffers.join() if self._whole else buffers.place()
            start = self._n_tokens - buffers.n_tokens
            for group in buffers.groups if buffers.n_tokens else ():
                for place, slot in enumerate(group.slots):
                    keys, values = (
                        tuple(buffers.arrays[name][place] for name in names)
                        for names in group.array_names.values()
                    )
                    kind_of(slots[slot]).refill(slots[slot], keys, values, start, self._n_tokens)
        for group in self._spec.quantized if self._n_newest else ():
            newest = [self._at_end[f"{group.name}.{side}"] for side in group.shapes]
            for place, slot in enumerate(group.slots):
                own = (x[place : place + 1, :, : self._n_newest] for x in newest)
                slots[slot].recall(*own)
            mx.eval([slots[slot].state for slot in group.slots])
        for group in self._spec.recurrent if self._at_end else ():
            for number, form in enumerate(group.states):
                if form is not None:
                    rows = mx.split(self._at_end[f"{group.name}.{number}"], len(group.slots))
                    for slot, row in zip(group.slots, rows, strict=True):
                        kind_of(slots[slot]).states(slots[slot])[number] = row
                    mx.eval(rows)
        return caches


@dataclass
class _Buffers:
    """The buffers of some groups' slots, filled from token 0 on.

    `arrays` maps each name to one buffer [1, H, S, ...] per slot. `forms` describe the same
    buffers, spare room included, with stacked slots.
    """

    groups: Sequence[LayerGroup]
    n_tokens: int
    forms: Sequence[ArrayForm]
    arrays: dict[str, list[mx.array]]
    waiting: list[Piece] = field(default_factory=list)
    n_added: int = 0

    def place(self) -> None:
        pieces, self.waiting = self.waiting, []
        start = self.n_added - sum(piece.stop - piece.start for piece in pieces)
        for name, buffers in self.arrays.items():
            stacked = mx.concatenate(
                [piece.arrays[name][:, :, piece.start : piece.stop] for piece in pieces], axis=2
            )
            for place, buffer in enumerate(buffers):
                slot = stacked[place : place + 1]
                if slot.shape == buffer.shape:  # MLX would share the piece's memory here
                    buffers[place] = copied(slot)
                else:
                    buffer[:, :, start : self.n_added] = slot
        mx.eval(self.arrays)

    def join(self) -> None:
        """Make each buffer from all pieces together, the largest buffer first.

        The slots are joined in stacks as large as memory allows, because large copies are faster.
        """
        pieces, self.waiting = self.waiting, []
        total = forms_bytes(self.forms)
        left = total + total // _SPARE_SHARE
        only = mx.array([0])
        for form in sorted(self.forms, key=lambda form: forms_bytes([form]), reverse=True):
            name, (n_slots, n_heads, n_room, dim), dtype = form
            buffers = self.arrays[name]
            slot_bytes = max(1, forms_bytes([form]) // n_slots)  # some caches have no values
            while (first := len(buffers)) < n_slots:
                n_at_once = min(max(1, left // (2 * slot_bytes)), n_slots - first)
                arrays = [piece.arrays[name] for piece in pieces]
                if n_at_once < n_slots:
                    arrays = [array[first : first + n_at_once] for array in arrays]
                for i, piece in enumerate(pieces):
                    if piece.stop - piece.start < arrays[i].shape[2]:
                        arrays[i] = arrays[i][:, :, piece.start : piece.stop]
                spare = mx.zeros((n_at_once, n_heads, n_room - self.n_tokens, dim), dtype)
                stacked = mx.concatenate([*arrays, spare], axis=2)
                # Taking a slot copies it; a slice would share the memory of the whole stack.
                slots = [mx.take(slot, only, axis=0) for slot in mx.split(stacked, n_at_once)]
                mx.eval(slots)
                buffers += slots
                left -= slot_bytes * len(slots)
                del stacked, slots  # before the next slots are stacked


def canary_difference(
    model: Any, spec: ModelCacheSpec, caches: Sequence[Any], ids: Sequence[int]
) -> float:
    """Compute the last tokens of restored caches again; return how much their KV differs.

    The caches hold the tokens `ids`. Their stored KV is put back at the end. Each token's
    difference in a slot's keys or values is |new - old| / |old|. For each `CANARY_TOKENS` tokens in
    a row, the median is taken; the largest median is returned. The result is 0 if the caches cannot
    be trimmed: states, or windows that have dropped tokens. If `ids` fill the last block of the
    grid, the recomputed tokens see this block quantized, so half the difference is returned. Tokens
    up to the last image are skipped, because `ids` do not give the image's pixels.

    If there are fewer than `least_rows` tokens, each token has its own call, because MLX may
    compile kernels for a call of a few rows.
    """
    slots = slots_of(caches)
    used = [slots[number] for group in spec.groups for number in group.slots]
    is_dropped = any(len(ids) >= window for window in spec.sliding)
    if is_dropped or not all(slot.is_trimmable() for slot in used):
        return 0.0
    n_own = len(ids) % GRID if spec.quantized else len(ids)
    n_wanted = max(CANARY_TOKENS, least_rows())
    text = takewhile(lambda token_id: token_id >= 0, reversed(ids[-n_wanted:]))
    n_tokens = n_at_once = min(len(list(text)), n_own or len(ids))
    if n_tokens == 0:
        return 0.0
    if n_tokens < least_rows():
        n_tokens, n_at_once = min(n_tokens, CANARY_TOKENS), 1
    start, stop = len(ids) - n_tokens, len(ids)
    stored = [_stacked(group, slots, start, stop) for group in spec.groups]
    mx.eval(stored)  # copied before the buffers change
    quantized = [slots[number] for group in spec.quantized for number in group.slots]
    newest = [copy.deepcopy(slot.newest) for slot in quantized]
    for slot in used:
        slot.trim(n_tokens)
    for first in range(start, stop, n_at_once):
        model(mx.array([list(ids[first : first + n_at_once])]), cache=list(caches))
    computed = [_stacked(group, slots, start, stop) for group in spec.groups]
    medians = (
        median
        for group, old, new in zip(spec.groups, stored, computed, strict=True)
        for median in _medians(group, old, new)
    )
    worst = float(mx.max(mx.concatenate(list(medians))))
    for group, old in zip(spec.groups, stored, strict=True):
        if group.precision and n_own:
            continue  # these tokens are in `newest`, not in the buffers
        for place, number in enumerate(group.slots):
            buffers = slots[number].keys, slots[number].values
            for buffer_fields, fields in zip(map(pk.arrays_of, buffers), old, strict=True):
                for buffer, values in zip(buffer_fields, fields, strict=True):
                    buffer[:, :, start:stop] = values[place : place + 1]
    for slot, tokens in zip(quantized, newest, strict=True):
        slot.newest = tokens
    mx.eval([(slot.keys, slot.values) for slot in used])
    return worst if n_own else worst / 2


def _medians(group: LayerGroup, old: Sequence[Fields], new: Sequence[Fields]) -> Iterator[mx.array]:
    """Yield the medians of all runs of tokens [slots * runs], of keys and then of values.

    If the tokens do not fill whole runs, the first tokens are skipped.
    """
    sides = group.precision or (None, None)
    for side, *old_and_new in zip(sides, old, new, strict=True):
        before, after = (
            fields[0].astype(mx.float32)
            if side is None
            else pk.dequantize(fields, side, mx.float32)
            for fields in old_and_new
        )
        error = mx.square(after - before).sum(axis=(1, 3))
        ratios = mx.sqrt(error / (mx.square(before).sum(axis=(1, 3)) + 1e-12))
        n_run = min(CANARY_TOKENS, ratios.shape[1])
        runs = ratios[:, ratios.shape[1] % n_run :].reshape(-1, n_run)
        yield mx.sort(runs, axis=1)[:, n_run // 2]


def _stacked(group: LayerGroup, slots: Sequence[Any], start: int, stop: int) -> list[Fields]:
    """Return keys and values of tokens [start, stop), each [slots, H, n, D], lazy.

    All slots are stacked together: separate reads would take a thousand operations.
    """
    caches = [slots[number] for number in group.slots]
    by_slot = [kind_of(cache).tokens(cache, start, stop) for cache in caches]
    return [
        tuple(concatenated(arrays, axis=0) for arrays in zip(*fields, strict=True))
        for fields in zip(*by_slot, strict=True)
    ]
