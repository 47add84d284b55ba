"""The geometry of a model's prompt cache and of its slots, learned from a trace of a few tokens.

Nothing is evaluated. The first trace fills the model's own caches, to learn their geometry. Further
traces use our quantized caches, and show whether the model's code accepts these.

Shapes do not show all facts. `python -m models_check --facts write` evaluates a tiny model of every
architecture of mlx-lm and writes the other facts to `architectures.json`. CI fails if this file is
outdated. The generation thread traces the model; any thread may read the result.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, lru_cache
from importlib.metadata import distribution
from itertools import groupby
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList, make_prompt_cache

from ...errors import KVPersistError, ModelNotSupported
from ..live.attention import AttentionPlan
from ..live.caches import SequenceQuantizedKVCache
from ..live.packed import GRID, scale_dtype
from .kinds import KINDS, REFUSED, GroupKind, empty_copy, replaced, slots_of
from .precision import KVPrecision, PrecisionChoice

FILE = Path(__file__).with_name("architectures.json")
_MODELS = "mlx_lm.models."

_PROBE_IDS = tuple(range(1, 17))
"""More tokens than any convolution or n-gram sees, so that states get their final shape."""

_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
"""Fields of a model's arguments that can give the length of a table of position embeddings."""

_FIELDS = ("weights", "scales", "biases")
"""The arrays of quantized keys or values; in full precision they are one array."""

ArrayForm = tuple[str, tuple[int, ...], mx.Dtype]
"""Name, shape and dtype of an array in a file."""


@dataclass(frozen=True)
class TensorShape:
    """Keys, or values, of a slot; `dtype` is like "bfloat16"."""

    n_heads: int
    dim: int
    dtype: str


@dataclass(frozen=True)
class LayerGroup:
    """Slots of one kind and geometry, stored with their arrays stacked.

    `name` is the group's number as text, and `cache` is the class that the model makes. `slots` are
    indices in the flattened prompt cache, ascending. A recurrent group has no `keys` and `values`.
    Its `states` are the shape (without the row) and dtype of each array, or None for an array that
    is not used. `why` says why a group is not quantized.
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
        """Bytes of the states of all slots."""
        return forms_bytes(state_arrays([self]))

    @property
    def full_precision_bytes(self) -> int:
        """Bytes of one token in all slots in full precision."""
        return replace(self, precision=None).bytes_per_token

    @cached_property
    def array_names(self) -> dict[str, list[str]]:
        fields = [f".{field}" for field in _FIELDS] if self.precision else [""]
        return {side: [f"{self.name}.{side}{field}" for field in fields] for side in self.shapes}

    @cached_property
    def shapes(self) -> dict[str, TensorShape]:
        shapes = {"k": self.keys, "v": self.values}
        return {side: shape for side, shape in shapes.items() if shape is not None}

    def describe(self) -> dict[str, Any]:
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

    `template` is an empty prompt cache of the live classes. `batches` and `joins` are described at
    `Architecture`. `plans` maps a quantized group's name to its attention plan. Layers without a
    plan dequantize.
    """

    groups: tuple[LayerGroup, ...]
    template: Sequence[Any] = field(repr=False, compare=False)
    batches: bool = True
    joins: bool = field(default=False, compare=False)
    plans: Mapping[str, AttentionPlan] = field(default_factory=dict, compare=False)

    @cached_property
    def full(self) -> tuple[LayerGroup, ...]:
        """Groups whose caches hold every token; block files contain only these groups."""
        return tuple(group for group in self.groups if group.kind is GroupKind.FULL)

    @cached_property
    def precisions(self) -> dict[int, KVPrecision | None]:
        precisions = {slot: group.precision for group in self.full for slot in group.slots}
        return dict(sorted(precisions.items()))

    @cached_property
    def quantized(self) -> tuple[LayerGroup, ...]:
        """Full groups that are quantized, except for their newest tokens."""
        return tuple(group for group in self.full if group.precision is not None)

    @cached_property
    def newest_bytes(self) -> int:
        """Bytes of one token of the quantized groups in full precision."""
        return sum(group.full_precision_bytes for group in self.quantized)

    def is_unfinished(self, n_tokens: int) -> bool:
        """Whether a block of `n_tokens` tokens is unfinished, and thus stored in full precision.

        Models with windows or states have no unfinished block: their blocks end at checkpoints.
        """
        return self.any_prefix and n_tokens < GRID

    def block_arrays(self, n_tokens: int) -> Iterator[ArrayForm]:
        groups = as_computed(self.full) if self.is_unfinished(n_tokens) else self.full
        return token_arrays(groups, n_tokens)

    @cached_property
    def sliding(self) -> dict[int, tuple[LayerGroup, ...]]:
        windows = sorted({group.window for group in self.groups if group.window is not None})
        return {w: tuple(group for group in self.groups if group.window == w) for w in windows}

    @cached_property
    def recurrent(self) -> tuple[LayerGroup, ...]:
        return tuple(group for group in self.groups if group.kind is GroupKind.RECURRENT)

    @cached_property
    def any_prefix(self) -> bool:
        """Whether all groups are full: then sequences continue from blocks, without checkpoints."""
        return not self.sliding and not self.recurrent

    @cached_property
    def layout(self) -> str:
        """A name for the way this model's KV is stored; no two ways share a name.

        It lists the precisions of layers in order. If all layers have the same precision, it is
        listed once. Otherwise, for example if head sizes differ, each run of equal layers has its
        precision, "*" and its number of layers: "k8rv4rb64*12,k8rv4rb32*2,c256". "c256" stands for
        three rules. Queries see their own block of the grid in full precision. An unfinished block
        is stored in full precision. Scales and biases have 16 bits.
        """
        forms = (str(precision or "full") for precision in self.precisions.values())
        runs = [(form, len(list(run))) for form, run in groupby(forms)]
        words = [form if len(runs) == 1 else f"{form}*{length}" for form, length in runs]
        windows = [f"w{window}" for window in self.sliding]
        grid = [f"c{GRID}"] * bool(self.quantized)
        return ",".join([*words, *grid, *windows, *["state"] * bool(self.recurrent)])

    @cached_property
    def bytes_per_token(self) -> int:
        """Bytes of a token in the full groups, after quantized groups have quantized the token."""
        return sum(group.bytes_per_token for group in self.full)

    @cached_property
    def bits_per_number(self) -> float:
        """Mean bits of a number in the full groups' keys and values, with scales and biases."""
        shapes = ((g.slots, shape) for g in self.full for shape in (g.keys, g.values) if shape)
        n_numbers = sum(len(slots) * shape.n_heads * shape.dim for slots, shape in shapes)
        return 8 * self.bytes_per_token / n_numbers

    @cached_property
    def bytes_per_checkpoint(self) -> int:
        """The most bytes that a restore needs besides blocks: windows, states, newest tokens."""
        windows = sum((group.window or 0) * group.bytes_per_token for group in self.groups)
        newest = 0 if self.any_prefix else (GRID - 1) * self.newest_bytes
        return windows + newest + sum(group.state_bytes for group in self.recurrent)

    def make_cache(self) -> list[Any]:
        return replaced(self.template, [empty_copy(slot) for slot in slots_of(self.template)])

    @property
    def batching(self) -> str:
        return "prompts and replies" if self.joins else "replies" if self.batches else "nothing"

    def describe(self) -> dict[str, Any]:
        return {
            "layout": self.layout,
            "n_layers": len(self.template),
            "bytes_per_token": self.bytes_per_token,
            "bytes_per_checkpoint": self.bytes_per_checkpoint,
            "batching": self.batching,
            "groups": [group.describe() for group in self.groups],
        }


def token_arrays(groups: Iterable[LayerGroup], n_tokens: int) -> Iterator[ArrayForm]:
    """Yield the forms of the groups' arrays, [slots, heads, n_tokens, ...]."""
    for group in groups if n_tokens else ():
        sides = group.precision or (None, None)
        for (side, shape), quantization in zip(group.shapes.items(), sides, strict=False):
            name, *scale_names = group.array_names[side]
            lead, dtype = (len(group.slots), shape.n_heads, n_tokens), getattr(mx, shape.dtype)
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
    """Yield the forms of recurrent groups' state arrays, [slots, ...]."""
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
    return sum(math.prod(shape) * int(dtype.size) for _, shape, dtype in forms)


def probe_model(model: Any, choice: PrecisionChoice | None = None) -> ModelCacheSpec:
    """Return a model's spec for the requested precision, from shapes; nothing is evaluated.

    A group of kind `FULL` is quantized if that saves memory and the model's code accepts it. All
    other groups stay in full precision. `batches` and `joins` have their defaults.

    Raises ModelNotSupported if the class or form of a layer's cache is not supported, or if the
    model fails on a few tokens.
    """
    try:
        return _probed(model, choice or PrecisionChoice())
    except ModelNotSupported:
        raise
    except Exception as error:
        # Stock may be able to serve the model, whatever the error was.
        raise ModelNotSupported(f"the model cannot be probed: {error!r}") from error


def _probed(model: Any, choice: PrecisionChoice) -> ModelCacheSpec:
    caches = make_prompt_cache(model)
    _check_classes(caches)
    _forward(model, caches)
    groups = _groups(caches, choice)
    if not groups:
        raise ModelNotSupported("the model keeps no cache")
    working = [replace(group, precision=None) for group in groups]
    for place, group in enumerate(groups):
        if group.precision is not None:
            spec = spec_with(model, [*working[:place], group])
            try:
                _forward(model, spec.make_cache())
                working[place] = group
            except Exception as error:
                why = f"the model's attention does not take it: {type(error).__name__}: {error}"
                working[place] = replace(working[place], why=why)
    return spec_with(model, working)


def spec_with(model: Any, groups: Sequence[LayerGroup]) -> ModelCacheSpec:
    caches = make_prompt_cache(model)  # new caches: an emptied cache may keep traces of its use
    slots = slots_of(caches)
    for group in groups:
        if group.precision is not None:
            for number in group.slots:
                slots[number] = SequenceQuantizedKVCache(group.precision)
    return ModelCacheSpec(tuple(groups), replaced(caches, slots))


def position_limit(model: Any) -> int | None:
    """Return the number of positions that a model has, or None if it is not known.

    Later positions must not be computed: if the model has a table of position embeddings, MLX would
    read beyond this table.
    """
    limits = [getattr(getattr(model, "args", None), name, None) for name in _POSITIONS]
    return min((limit for limit in limits if isinstance(limit, int)), default=None)


def _check_classes(caches: Sequence[Any], place: str = "layer") -> None:
    for i, cache in enumerate(caches):
        where = f"{place} {i}"
        if isinstance(cache, CacheList):
            _check_classes(cache.caches, f"{where} part")
            continue
        name = type(cache).__name__
        reason = REFUSED.get(name, "the plugin does not support this class")
        if type(cache) in KINDS:
            reason = KINDS[type(cache)].refusal(cache)
        if reason:
            raise ModelNotSupported(f"{where} has a {name}: {reason}")


def _forward(model: Any, caches: list[Any]) -> None:
    for ids in (_PROBE_IDS[:-1], _PROBE_IDS[-1:]):
        model(mx.array([ids], mx.int32), cache=caches)


def _groups(caches: Sequence[Any], choice: PrecisionChoice) -> list[LayerGroup]:
    slots_by_form: dict[tuple[int, type, Any], list[int]] = {}
    places = [place for cache in caches for place in range(len(slots_of([cache])))]
    for number, slot in enumerate(slots_of(caches)):
        form = _form(number, slot)
        if form is not None:
            slots_by_form.setdefault((places[number], type(slot), form), []).append(number)
    groups = []
    for number, ((_, cls, form), slots) in enumerate(slots_by_form.items()):
        kind, name, cache = KINDS[cls].group, str(number), cls.__name__
        if kind is GroupKind.RECURRENT:
            groups.append(LayerGroup(name, kind, cache, tuple(slots), states=form))
            continue
        keys, values, window = form
        precision, why = None, "windows stay in full precision"
        if kind is GroupKind.FULL:
            why = f"no quantized cache can take the place of a {cache}"
        if KINDS[cls].can_be_quantized:
            precision, why = _fitting(keys, values, choice)
        group = LayerGroup(name, kind, cache, tuple(slots), keys, values, precision, why, window)
        if precision and group.bytes_per_token >= group.full_precision_bytes:
            why = f"quantized in whole groups of {precision.group_size} it takes no less memory"
            group = replace(group, precision=None, why=why)
        groups.append(group)
    return groups


def _form(number: int, slot: Any) -> tuple[Any, ...] | None:
    kind = KINDS[type(slot)]
    if kind.group is GroupKind.RECURRENT:
        states = []
        for x in kind.states(slot):
            if x is not None and (not isinstance(x, mx.array) or x.shape[0] != 1):
                raise ModelNotSupported(
                    f"cache {number} has a state that is not an array with one row"
                )
            states.append(None if x is None else (tuple(x.shape[1:]), dtype_name(x.dtype)))
        return tuple(states) if any(states) else None
    if slot.keys is None and slot.values is None:
        return None
    if slot.offset != len(_PROBE_IDS):
        raise ModelNotSupported(
            f"cache {number} holds {slot.offset} tokens after a forward pass of {len(_PROBE_IDS)}"
        )
    shapes = []
    for name, x in (("keys", slot.keys), ("values", slot.values)):
        if not isinstance(x, mx.array) or x.ndim != 4 or x.shape[0] != 1:
            raise ModelNotSupported(
                f"cache {number} has {name} of shape {getattr(x, 'shape', None)}, expected "
                "(1, heads, tokens, dim)"
            )
        shapes.append(TensorShape(x.shape[1], x.shape[3], dtype_name(x.dtype)))
    return shapes[0], shapes[1], kind.window(slot) if kind.window else None


def _fitting(
    keys: TensorShape, values: TensorShape, choice: PrecisionChoice
) -> tuple[KVPrecision | None, str]:
    """Return the first precision with the least padding, or the reason why none fits."""
    if choice.is_full_precision:
        return None, "full precision is requested"
    for shape in (keys, values):
        if shape.dtype not in ("float16", "bfloat16", "float32"):
            return None, f"MLX does not quantize {shape.dtype}"
    if 0 in (keys.dim, values.dim):
        return None, "keys without values are an index, which decides what is seen"
    fitted = [precision.fitted(keys.dim, values.dim) for precision in choice.candidates()]
    return min(fitted, key=lambda fit: fit.keys.padding + fit.values.padding), ""


@dataclass(frozen=True)
class Architecture:
    """The facts of every model of one module of `mlx_lm.models`.

    `batches`: replies to prompts of unequal length may be decoded in one batch. `joins`: such
    prompts may also be computed in one call. `packed`: attention over packed keys gives the same
    result as over dequantized keys. `refused`: why conversations cannot be stored although
    `probe_model` accepts the caches, or "".
    """

    batches: bool
    joins: bool
    packed: bool
    refused: str = ""


def architecture_of(model: Any) -> Architecture | None:
    """Return the facts of a model's architecture, or None if nothing is proven about it.

    `FILE` names the modules and releases of mlx-lm with proven facts. Raises KVPersistError if
    `FILE` is missing or damaged.
    """
    module = str(model.__class__.__module__)  # not type(model), which could be a proxy
    if not module.startswith(_MODELS):
        return None
    installed = distribution("mlx-lm")
    source = json.loads(installed.read_text("direct_url.json") or "{}")
    if "vcs_info" in source or source.get("dir_info", {}).get("editable"):
        return None  # an unreleased version may have the number of a release
    return known().get(installed.version, {}).get(module.removeprefix(_MODELS))


@lru_cache
def known() -> dict[str, dict[str, Architecture]]:
    """Return the facts by version of mlx-lm, and by module."""
    try:
        content = json.loads(FILE.read_text(encoding="utf-8"))
        newest = _read(content["architectures"])
        older = {version: newest | _read(facts) for version, facts in content["older"].items()}
        return {content["newest"]: newest, **older}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise KVPersistError(
            f"{FILE} cannot be used ({type(error).__name__}: {error}); "
            "install the package again: pip install --force-reinstall mlx-lm-kvpersist"
        ) from error


def _read(facts: dict[str, dict[str, Any]]) -> dict[str, Architecture]:
    return {module: Architecture(**fields) for module, fields in facts.items()}


def spec_of(model: Any, choice: PrecisionChoice, facts: Architecture | None) -> ModelCacheSpec:
    """Return `probe_model`'s spec with the facts on batching.

    If `facts` is None, replies are batched as in mlx-lm, and prompts are never computed
    together. Raises ModelNotSupported if the caches cannot be stored, or the architecture is
    refused.
    """
    spec = probe_model(model, choice)
    if facts is None:
        return spec
    if facts.refused:
        raise ModelNotSupported(f"its architecture is not supported: {facts.refused}")
    return replace(spec, batches=facts.batches, joins=facts.joins)
