"""The geometry of a model's prompt cache and of its slots. Generation thread."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import groupby
from typing import Any

import mlx.core as mx

from ..live.attention import AttentionPlan
from ..live.packed import GRID, scale_dtype
from .kinds import GroupKind, empty_copy, replaced, slots_of
from .precision import KVPrecision

_FIELDS = ("weights", "scales", "biases")
"""The arrays of quantized keys or values; in full precision they are one array."""

ArrayForm = tuple[str, tuple[int, ...], mx.Dtype]
"""Name, shape and dtype of an array in a file."""


@dataclass(frozen=True)
class TensorShape:
    """Keys, or values, of a slot: `n_heads` heads of `dim` numbers; `dtype` is like "bfloat16"."""

    n_heads: int
    dim: int
    dtype: str

    @cached_property
    def mx_dtype(self) -> mx.Dtype:
        dtype: mx.Dtype = getattr(mx, self.dtype)
        return dtype


@dataclass(frozen=True)
class LayerGroup:
    """Slots of one kind and geometry, stored with their arrays stacked.

    `name` is the group's number as text and `cache` the class that the model makes. `slots` are
    indices in the flattened prompt cache, ascending. A recurrent group has no `keys` and `values`;
    its `states` have the shape (without the row) and dtype of each array, None for a state that the
    model leaves empty. `why` says why a group is not quantized.
    """

    name: str
    kind: GroupKind
    cache: str
    slots: tuple[int, ...]
    keys: TensorShape | None = None
    values: TensorShape | None = None
    precision: KVPrecision | None = None
    why: str = ""
    window: int | None = None
    states: tuple[tuple[tuple[int, ...], str] | None, ...] = ()

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all slots; 0 for a recurrent group."""
        return forms_bytes(token_arrays([self], 1))

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of all slots, for any number of tokens."""
        return forms_bytes(state_arrays([self]))

    @property
    def full_precision_bytes(self) -> int:
        """Bytes of one token in all slots in full precision."""
        return replace(self, precision=None).bytes_per_token

    @cached_property
    def array_names(self) -> dict[str, list[str]]:
        """The names of the arrays of keys ("k") and values ("v")."""
        fields = [f".{field}" for field in _FIELDS] if self.precision else [""]
        return {side: [f"{self.name}.{side}{field}" for field in fields] for side in self.shapes}

    @cached_property
    def shapes(self) -> dict[str, TensorShape]:
        """The shapes of keys ("k") and values ("v"); empty for a recurrent group."""
        shapes = {"k": self.keys, "v": self.values}
        return {side: shape for side, shape in shapes.items() if shape is not None}

    def describe(self) -> dict[str, Any]:
        """Return the group as JSON values."""
        described: dict[str, Any] = {
            "name": self.name,
            "kind": self.kind.value,
            "cache": self.cache,
            "slots": list(self.slots),
            "bits": str(self.precision) if self.precision else None,
            "why_not_quantized": self.why or None,
            "bytes_per_token": self.bytes_per_token,
        }
        for name, shape in zip(("keys", "values"), self.shapes.values(), strict=False):
            described[name] = asdict(shape)
        if self.window is not None:
            described["window"] = self.window
        if self.states:
            described["state_bytes"] = self.state_bytes
        return described


@dataclass(frozen=True)
class ModelCacheSpec:
    """The layer groups of a model, and how its live caches are made.

    `template` is an empty prompt cache of the live classes. `batches`: whether the replies of
    sequences of unequal length can be decoded together with correct results. `joins`: whether
    prompts can also be computed together. `plans` has, by the name of a quantized group, its
    attention plan; layers without a plan dequantize.
    """

    groups: tuple[LayerGroup, ...]
    template: Sequence[Any] = field(repr=False, compare=False)
    batches: bool = True
    joins: bool = field(default=False, compare=False)
    plans: Mapping[str, AttentionPlan] = field(default_factory=dict, compare=False)

    @cached_property
    def full(self) -> tuple[LayerGroup, ...]:
        """Groups that hold every token; block files have these."""
        return tuple(group for group in self.groups if group.kind is GroupKind.FULL)

    @cached_property
    def precisions(self) -> dict[int, KVPrecision | None]:
        """The precision of each slot of the full groups, in the order of the slots."""
        precisions = {slot: group.precision for group in self.full for slot in group.slots}
        return dict(sorted(precisions.items()))

    @cached_property
    def quantized(self) -> tuple[LayerGroup, ...]:
        """Full groups that are read quantized, except for their newest tokens."""
        return tuple(group for group in self.full if group.precision is not None)

    @cached_property
    def newest_bytes(self) -> int:
        """Bytes of one token of the quantized groups in full precision."""
        return sum(group.full_precision_bytes for group in self.quantized)

    def is_unfinished(self, n_tokens: int) -> bool:
        """Whether a block of `n_tokens` tokens is stored in full precision.

        False for models with windows or states: their blocks end at checkpoints and are final.
        """
        return self.any_prefix and n_tokens < GRID

    def block_arrays(self, n_tokens: int) -> Iterator[ArrayForm]:
        """Yield the arrays of a block's file."""
        groups = as_computed(self.full) if self.is_unfinished(n_tokens) else self.full
        return token_arrays(groups, n_tokens)

    @cached_property
    def sliding(self) -> dict[int, tuple[LayerGroup, ...]]:
        """Sliding groups by their window, in tokens."""
        windows = sorted({group.window for group in self.groups if group.window is not None})
        return {w: tuple(group for group in self.groups if group.window == w) for w in windows}

    @cached_property
    def recurrent(self) -> tuple[LayerGroup, ...]:
        return tuple(group for group in self.groups if group.kind is GroupKind.RECURRENT)

    @cached_property
    def any_prefix(self) -> bool:
        """Whether all groups are full: any prefix can be continued without a checkpoint."""
        return not self.sliding and not self.recurrent

    @cached_property
    def layout(self) -> str:
        """A word that identifies how this model's KV is stored; different layouts have different
        words.

        It lists the precisions of layers in order. If layers differ, for example in the size of
        their heads, it counts them: "k8rv4rb64*12,k8rv4rb32*2,c256". "c256" says that queries see
        their own block of the grid, and an unfinished block is stored, in full precision, and that
        scales and biases have 16 bits.
        """
        forms = (str(precision or "full") for precision in self.precisions.values())
        runs = [(form, len(list(run))) for form, run in groupby(forms)]
        words = [form if len(runs) == 1 else f"{form}*{length}" for form, length in runs]
        windows = [f"w{window}" for window in self.sliding]
        grid = [f"c{GRID}"] * bool(self.quantized)
        return ",".join([*words, *grid, *windows, *["state"] * bool(self.recurrent)])

    @cached_property
    def bytes_per_token(self) -> int:
        """Bytes of a token in the full groups, live and on disk."""
        return sum(group.bytes_per_token for group in self.full)

    @cached_property
    def bits_per_number(self) -> float:
        """Mean bits of a number in the full groups' keys and values, with scales and biases."""
        shapes = ((g.slots, shape) for g in self.full for shape in (g.keys, g.values) if shape)
        n_numbers = sum(len(slots) * shape.n_heads * shape.dim for slots, shape in shapes)
        return 8 * self.bytes_per_token / n_numbers

    @cached_property
    def bytes_per_checkpoint(self) -> int:
        """The most bytes of a restore in addition to the blocks: windows, states, newest tokens."""
        windows = sum((group.window or 0) * group.bytes_per_token for group in self.groups)
        newest = 0 if self.any_prefix else (GRID - 1) * self.newest_bytes
        return windows + newest + sum(group.state_bytes for group in self.recurrent)

    def make_cache(self) -> list[Any]:
        """Return an empty prompt cache; replaces the model's `make_cache`."""
        return replaced(self.template, [empty_copy(slot) for slot in slots_of(self.template)])

    @property
    def batching(self) -> str:
        """Names what is computed together for several sequences: prompts, replies or nothing."""
        return "prompts and replies" if self.joins else "replies" if self.batches else "nothing"

    def describe(self) -> dict[str, Any]:
        """Return the spec as JSON values; equal specs give equal descriptions."""
        return {
            "layout": self.layout,
            "n_layers": len(self.template),
            "bytes_per_token": self.bytes_per_token,
            "bytes_per_checkpoint": self.bytes_per_checkpoint,
            "batching": self.batching,
            "groups": [group.describe() for group in self.groups],
        }


def token_arrays(groups: Iterable[LayerGroup], n_tokens: int) -> Iterator[ArrayForm]:
    """Yield the arrays of `n_tokens` of groups, [slots, heads, tokens, ...]; none for 0 tokens."""
    for group in groups if n_tokens else ():
        sides = group.precision.sides if group.precision else (None, None)
        for (side, shape), quantization in zip(group.shapes.items(), sides, strict=False):
            name, *scale_names = group.array_names[side]
            lead, dtype = (len(group.slots), shape.n_heads, n_tokens), shape.mx_dtype
            if quantization is None:
                yield name, (*lead, shape.dim), dtype
                continue
            width = shape.dim + quantization.padding
            yield name, (*lead, width * quantization.bits // 32), mx.uint32
            for scale_name in scale_names:
                yield scale_name, (*lead, width // quantization.group_size), scale_dtype(dtype)


def as_computed(groups: Iterable[LayerGroup]) -> list[LayerGroup]:
    """Return the groups in full precision, the form in which tokens are computed."""
    return [replace(group, precision=None) for group in groups]


def state_arrays(groups: Iterable[LayerGroup]) -> Iterator[ArrayForm]:
    """Yield the arrays of recurrent groups' states, [slots, ...]."""
    for group in groups:
        for number, state in enumerate(group.states):
            if state is not None:
                shape, dtype = state
                yield f"{group.name}.{number}", (len(group.slots), *shape), getattr(mx, dtype)


def arrays_fit(forms: Iterable[ArrayForm], arrays: Mapping[str, mx.array]) -> str | None:
    """Return how `arrays` differ from the expected `forms`, or None."""
    expected = {name: (shape, dtype) for name, shape, dtype in forms}
    if missing := sorted(expected.keys() - arrays.keys()):
        return f"no array {missing[0]}"
    if extra := sorted(arrays.keys() - expected.keys()):
        return f"unknown array {extra[0]}"
    for name, (shape, dtype) in expected.items():
        array = arrays[name]
        if tuple(array.shape) != shape:
            return f"{name} has shape {tuple(array.shape)}, expected {shape}"
        if array.dtype != dtype:
            return f"{name} is {dtype_name(array.dtype)}, expected {dtype_name(dtype)}"
    return None


def dtype_name(dtype: mx.Dtype) -> str:
    """Return a dtype's name in mlx.core: "float32"."""
    return str(dtype).rpartition(".")[2]


def forms_bytes(forms: Iterable[ArrayForm]) -> int:
    """Return the bytes of arrays with the forms."""
    return sum(math.prod(shape) * int(dtype.size) for _, shape, dtype in forms)
