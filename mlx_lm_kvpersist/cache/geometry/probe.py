"""Trace a model for a few tokens to learn its caches' geometry, and which can be quantized.

Nothing is decided by a model's name, and nothing is evaluated. The caches that the model makes are
filled first, to learn their geometry. Then our caches replace them, and a forward pass shows
whether the model's code accepts them.

Facts that shapes do not show ship as data. `python -m models_check --facts write` evaluates a tiny
model of every architecture of mlx-lm and writes `architectures.json`. CI repeats this, and fails if
the result differs from the file.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import CacheList, make_prompt_cache

from ...errors import KVPersistError, ModelNotSupported
from ..live.quantized import SequenceQuantizedKVCache
from .kinds import KINDS, REFUSED, GroupKind, replaced, slots_of
from .precision import KVPrecision, PrecisionChoice
from .spec import LayerGroup, ModelCacheSpec, TensorShape, dtype_name

FILE = Path(__file__).with_name("architectures.json")
_MODELS = "mlx_lm.models."

_PROBE_IDS = tuple(range(1, 17))
"""Longer than the context of any convolution or n-gram, so that states have their final shape."""

_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len")
"""Fields of a model's arguments that can give the length of a table of position embeddings."""

_SCALE_DTYPES = ("float16", "bfloat16", "float32")


def probe_model(model: Any, choice: PrecisionChoice | None = None) -> ModelCacheSpec:
    """Return a model's spec for the requested precision, from shapes; nothing is evaluated.

    Full groups get the precision whose group size needs the least padding, if it saves memory and
    the model's code accepts it; all other groups stay in full precision. `batches` and `joins` have
    their defaults (`spec_of` applies the facts).

    Raises ModelNotSupported if a layer's cache is of a class that is not supported, or has an
    unexpected form, or the model fails on a few tokens.
    """
    choice = choice or PrecisionChoice()
    try:
        return _probed(model, choice)
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
    """Return a model's spec with its slots in these groups, and live caches of their precision."""
    caches = make_prompt_cache(model)  # new caches: an emptied cache may keep traces of its use
    slots = slots_of(caches)
    for group in groups:
        if group.precision is not None:
            for number in group.slots:
                slots[number] = SequenceQuantizedKVCache(group.precision)
    return ModelCacheSpec(tuple(groups), replaced(caches, slots))


def position_limit(model: Any) -> int | None:
    """Return the number of positions of a model; None if it is not known.

    Beyond the end of a table of position embeddings MLX reads other memory.
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
        if type(cache) in KINDS:
            reason = KINDS[type(cache)].refusal(cache)
        else:
            reason = REFUSED.get(name, "the plugin does not support this class")
        if reason:
            raise ModelNotSupported(f"{where} has a {name}: {reason}")


def _forward(model: Any, caches: list[Any]) -> None:
    """Feed a prompt and then one token; the results stay lazy."""
    for ids in (_PROBE_IDS[:-1], _PROBE_IDS[-1:]):
        model(mx.array([ids], mx.int32), cache=caches)


def _groups(caches: Sequence[Any], choice: PrecisionChoice) -> list[LayerGroup]:
    """Group the slots of a filled prompt cache by their form; empty slots are in no group."""
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
    """Return a filled slot's shapes, dtypes and window; None for a slot that is empty."""
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
        if shape.dtype not in _SCALE_DTYPES:
            return None, f"MLX does not quantize {shape.dtype}"
    if 0 in (keys.dim, values.dim):
        return None, "keys without values are an index, which decides what is seen"
    fitted = [precision.fitted(keys.dim, values.dim) for precision in choice.candidates()]
    return min(fitted, key=lambda fit: fit.keys.padding + fit.values.padding), ""


@dataclass(frozen=True)
class Architecture:
    """The facts of one module of `mlx_lm.models`; they hold for every model of the module.

    `batches`: replies to prompts of unequal length may be decoded in one batch. `joins`: such
    prompts may also be computed in one call. `packed`: a layer that calls attention over its packed
    keys (`packed_shapes` traces this) gets the result of dequantized keys. `refused`: why its
    conversations cannot be stored, "" if they can; `probe_model` checks the classes of caches.
    """

    batches: bool
    joins: bool
    packed: bool
    refused: str = ""

    def applied_to(self, spec: ModelCacheSpec) -> ModelCacheSpec:
        """Return the spec of a model of this architecture, with `batches` and `joins`.

        Raises ModelNotSupported if the architecture is refused.
        """
        if self.refused:
            raise ModelNotSupported(f"its architecture is not supported: {self.refused}")
        return replace(spec, batches=self.batches, joins=self.joins)


def architecture_of(model: Any) -> Architecture | None:
    """Return the facts of a model's architecture, or None if nothing is proven about it.

    Nothing is proven about a class from outside `mlx_lm.models`, or about a module or a release of
    mlx-lm that the file does not name. Raises KVPersistError if the file is missing or damaged.
    """
    module = str(model.__class__.__module__)  # a proxy answers for its model
    if not module.startswith(_MODELS):
        return None
    installed = distribution("mlx-lm")
    source = json.loads(installed.read_text("direct_url.json") or "{}")
    if "vcs_info" in source or source.get("dir_info", {}).get("editable"):
        return None  # a snapshot has the number of a release, too
    return known().get(installed.version, {}).get(module.removeprefix(_MODELS))


@lru_cache
def known() -> dict[str, dict[str, Architecture]]:
    """Return the facts by version of mlx-lm, and by module; see `architecture_of`."""
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
    """Return a model's spec in a precision, with the facts on what is computed together.

    If `facts` is None, replies are batched as in stock, and prompts are never computed together.
    Raises ModelNotSupported if the caches cannot be stored.
    """
    spec = probe_model(model, choice)
    return spec if facts is None else facts.applied_to(spec)
