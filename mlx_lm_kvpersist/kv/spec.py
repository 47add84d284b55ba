"""What a model's KV cache looks like: found by running the model, never read from its config."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, make_prompt_cache

from ..errors import ModelNotSupported
from .precision import GROUP_SIZES, KVPrecision
from .quantized import SequenceQuantizedKVCache

__all__ = ["LayerGroup", "ModelCacheSpec"]

_SCALE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
_PROBE_TOKENS = 2


@dataclass(frozen=True)
class LayerGroup:
    """Layers whose keys and values have one geometry: `n_kv_heads` heads of `k_dim` and `v_dim`.

    `name` is the group's number as text, `layers` are indices into the prompt cache, ascending,
    `dtype` is the name of what the model computes in ("bfloat16"), and thus of all scales.
    """

    name: str
    layers: tuple[int, ...]
    n_kv_heads: int
    k_dim: int
    v_dim: int
    dtype: str

    @property
    def mx_dtype(self) -> mx.Dtype:
        dtype: mx.Dtype = getattr(mx, self.dtype)
        return dtype


@dataclass(frozen=True)
class ModelCacheSpec:
    """The layer groups of a model and the precision in which we keep them."""

    precision: KVPrecision
    groups: tuple[LayerGroup, ...]
    n_layers: int

    @classmethod
    def probe(cls, model: Any, bits: int = 4, group_size: int | None = None) -> ModelCacheSpec:
        """Run two tokens through `model` with its own caches and look at what they hold.

        Only shapes are looked at, nothing is evaluated. `group_size` None takes the first of 64,
        32 and 128 that divides every layer's last dimensions.

        Raises:
            ModelNotSupported: a layer's cache is not a plain KVCache or was not filled, or no
                group size fits.
            ValueError: MLX cannot quantize to `bits`, or in groups of `group_size`.
        """
        caches = make_prompt_cache(model)
        for i, cache in enumerate(caches):
            if type(cache) is not KVCache:
                raise ModelNotSupported(
                    f"layer {i} keeps a {type(cache).__name__}; only KVCache can be kept in 4 bits"
                )
        try:
            model(mx.zeros((1, _PROBE_TOKENS), mx.int32), cache=caches)
        except Exception as error:
            raise ModelNotSupported(
                f"a forward pass of {_PROBE_TOKENS} tokens failed: {error!r}"
            ) from error
        layers_of: dict[tuple[int, int, int, str], list[int]] = {}
        for i, cache in enumerate(caches):
            layers_of.setdefault(_geometry(i, cache), []).append(i)
        if not layers_of:
            raise ModelNotSupported("the model has no KV cache")
        dims = {dim for _, k_dim, v_dim, _ in layers_of for dim in (k_dim, v_dim)}
        groups = tuple(
            LayerGroup(str(n), tuple(layers), *geometry)
            for n, (geometry, layers) in enumerate(layers_of.items())
        )
        return cls(_fitting_precision(dims, bits, group_size), groups, len(caches))

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in all layers, packed."""
        return sum(
            len(group.layers)
            * group.n_kv_heads
            * self.precision.n_bytes(dim, _SCALE_BYTES[group.dtype])
            for group in self.groups
            for dim in (group.k_dim, group.v_dim)
        )

    def make_cache(self) -> list[SequenceQuantizedKVCache]:
        """Return one empty cache per layer; takes the place of a model's `make_cache`."""
        return [SequenceQuantizedKVCache(self.precision) for _ in range(self.n_layers)]

    def describe(self) -> dict[str, Any]:
        """Return the spec as JSON values; equal specs give equal descriptions."""
        return {
            "precision": str(self.precision),
            "n_layers": self.n_layers,
            "bytes_per_token": self.bytes_per_token,
            "groups": [
                {
                    "name": group.name,
                    "layers": list(group.layers),
                    "n_kv_heads": group.n_kv_heads,
                    "k_dim": group.k_dim,
                    "v_dim": group.v_dim,
                    "dtype": group.dtype,
                }
                for group in self.groups
            ],
        }

    def block_arrays(self, n_tokens: int) -> Iterator[tuple[str, tuple[int, ...], mx.Dtype]]:
        """Yield name, shape and dtype of each array of a block of `n_tokens`, in stored order."""
        for group in self.groups:
            shape = (len(group.layers), group.n_kv_heads, n_tokens)
            for part, dim in (("k", group.k_dim), ("v", group.v_dim)):
                n_groups = self.precision.groups(dim)
                name = f"{group.name}.{part}"
                yield f"{name}.weights", (*shape, self.precision.packed_dim(dim)), mx.uint32
                yield f"{name}.scales", (*shape, n_groups), group.mx_dtype
                yield f"{name}.biases", (*shape, n_groups), group.mx_dtype

    def block_arrays_fit(self, arrays: Mapping[str, mx.array], n_tokens: int) -> str | None:
        """Return why `arrays` are not a block of `n_tokens` of this model, or None if they are."""
        expected = {name: (shape, dtype) for name, shape, dtype in self.block_arrays(n_tokens)}
        if missing := sorted(expected.keys() - arrays.keys()):
            return f"no array {missing[0]}"
        if extra := sorted(arrays.keys() - expected.keys()):
            return f"unknown array {extra[0]}"
        for name, (shape, dtype) in expected.items():
            found = arrays[name]
            if tuple(found.shape) != shape:
                return f"{name} has shape {tuple(found.shape)}, expected {shape}"
            if found.dtype != dtype:
                return f"{name} is {_dtype_name(found.dtype)}, expected {_dtype_name(dtype)}"
        return None


def _geometry(layer: int, cache: KVCache) -> tuple[int, int, int, str]:
    """Return heads, K and V last dimension and dtype name of a cache filled by the probe."""
    keys, values = cache.keys, cache.values
    if keys is None or values is None or cache.offset != _PROBE_TOKENS:
        raise ModelNotSupported(
            f"layer {layer} was not filled by a forward pass: {cache.offset} of "
            f"{_PROBE_TOKENS} tokens"
        )
    for name, x in (("keys", keys), ("values", values)):
        if not isinstance(x, mx.array) or x.ndim != 4 or x.shape[0] != 1:
            raise ModelNotSupported(
                f"layer {layer} keeps {name} of shape {getattr(x, 'shape', None)}, expected "
                f"(1, heads, tokens, dim)"
            )
    dtype = _dtype_name(keys.dtype)
    if keys.dtype != values.dtype or keys.shape[1] != values.shape[1]:
        raise ModelNotSupported(
            f"layer {layer} keeps keys {keys.shape} {dtype} beside values {values.shape} "
            f"{_dtype_name(values.dtype)}; heads and dtype must agree"
        )
    if dtype not in _SCALE_BYTES:
        raise ModelNotSupported(
            f"layer {layer} keeps {dtype}, expected one of {', '.join(_SCALE_BYTES)}"
        )
    return keys.shape[1], keys.shape[3], values.shape[3], dtype


def _fitting_precision(dims: set[int], bits: int, group_size: int | None) -> KVPrecision:
    sizes = GROUP_SIZES if group_size is None else (group_size,)
    for size in sizes:
        precision = KVPrecision(bits, size)
        if all(precision.fits(dim) for dim in dims):
            return precision
    raise ModelNotSupported(
        f"no group size of {', '.join(map(str, sizes))} divides the last dimensions of keys and "
        f"values, {', '.join(map(str, sorted(dims)))}"
    )


def _dtype_name(dtype: mx.Dtype) -> str:
    return str(dtype).rpartition(".")[2]
