"""Predict the memory of the next chunk of a prompt, and of the sequences of a batch.

A formula, corrected by measured chunks, gives the memory of a chunk. The shapes of the arrays give
an upper bound on the memory of a batch's sequences and of one step.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any

import mlx.core as mx

from ..geometry.spec import LayerGroup, ModelCacheSpec, state_arrays, token_arrays
from ..live.packed import GRID, backend, capacity

MIN_CHUNK = 32
"""The number of tokens that may always be computed in one chunk, even if memory is short."""

CHECKPOINT_EVERY = 2048
"""Tokens of a prompt between two checkpoints of a model with windows or states."""

_MOST_TOKENS = 1 << 16

_TIMES_WIDTHS = 2
"""A layer takes this multiple of its matrices' outputs, because norms, rotations and activations
make arrays of the same widths."""

_STEP_BYTES = 7 * 256 * 4
"""`ssm_attn` of mlx-lm makes about seven arrays [heads, 256, 256] of float32 for 256 tokens."""

_LOOPED_STATES = 4
"""Mamba and Jamba loop over tokens and keep several states for each token."""

_FUSED_DIMS = (64, 80, 128)
"""Head dims for which every GPU has a fused kernel, in 16 bits."""

_HEADS = r"(num_attention|num|num_query|n)_heads?"
_TOP_K = r"num_experts_per_tok(en)?|top_k_experts|moe_(top_?)?k"
_EXPERTS = r"(n|num|moe_num)_(routed_|local_)?experts"

_LEAST_LEARNED = 256
"""The memory of shorter chunks is mostly overhead, which does not grow with the tokens."""

_LEAST_FACTOR = 0.1
"""The lowest factor: a small peak may be wrong, because other memory was freed at the same time."""

_MOST_ON_GPU = 2.0
"""The highest factor on a GPU. MLX queues every layer there: on an H100, the peak is 6 to 16 times
the formula's bytes. But MLX waits before it exceeds its limit, so chunks need not be shorter."""

_MARGIN, _EASING = 1.2, 0.1
"""Peaks of similar chunks differ by several percent. If a prediction was too high, each chunk
lowers it by a tenth of the difference."""


@dataclass
class PrefillMemory:
    """Bytes that a chunk takes besides the model and the caches, and their limit.

    `token_bytes` are one layer's activations, for each token. `score_bytes` are one layer's scores
    and masks, for each pair of token and key. On a GPU, `score_bytes` are the copies of dequantized
    keys and values if these are larger. `key_bytes` are one layer's dequantized keys and values,
    for each key, cached or new. `window` is the most cached keys that a layer sees, if there is a
    limit. Checkpoints are made at multiples of `stops_every`, so chunks end there. Only the
    generation thread calls `learn`; any thread may read.
    """

    token_bytes: float
    score_bytes: float
    key_bytes: float
    limit_bytes: int
    stops_every: int | None = None
    window: int | None = None
    most_factor: float = math.inf
    _factors: Mapping[int, float] = field(default_factory=dict)
    """The measured bytes of chunks as a multiple of the formula's, by the bit length of the
    position. The mapping is replaced, never changed."""

    @classmethod
    def of(cls, model: Any, spec: ModelCacheSpec, limit_bytes: int) -> PrefillMemory:
        """Return the memory that chunks of prompts need, from the shapes of the model's parameters.

        On the CPU, the formula gives 0.5 to 2 times the measured bytes for most architectures, and
        up to 7 times for layers with states or without own matrices.
        """
        attending = [group for group in spec.groups if group.keys is not None]
        n_heads = max(_arguments(model, _HEADS), default=64)
        token_bytes, itemsize = _activation_bytes(model)
        token_bytes += max(map(_state_bytes, spec.recurrent), default=0)
        scores = (_score_bytes(group, n_heads, itemsize) for group in attending)
        score_bytes = float(max(scores, default=0))
        key_bytes = max((g.full_precision_bytes // len(g.slots) for g in spec.full), default=0)
        if spec.quantized and backend() != "cpu":
            # A GPU copies the dequantized keys and values for each span of a chunk, because the
            # attention of the previous span may still read them.
            score_bytes = max(score_bytes, key_bytes / GRID)
        stops_every = None if spec.any_prefix else CHECKPOINT_EVERY
        window = None if spec.full else max(spec.sliding, default=0)
        most_factor = math.inf if backend() == "cpu" else _MOST_ON_GPU
        sizes = token_bytes, score_bytes, key_bytes, limit_bytes
        return cls(*sizes, stops_every, window, most_factor)

    def peak_bytes(self, n_tokens: int, position: int) -> int:
        """Return the most bytes that a chunk after `position` cached tokens takes."""
        return int(self._factor(position) * self._formula(n_tokens, position))

    def most_tokens(self, position: int) -> int:
        """Return the longest chunk after `position` cached tokens that stays within the limit.

        If the limit allows fewer tokens than `MIN_CHUNK`, the chunk exceeds the limit. If
        `stops_every` is set, a chunk ends at its next multiple at the latest.
        """
        # The larger root n of peak_bytes(n, position) = limit_bytes, without a division by 0.
        n_seen = self._seen(position)
        limit_bytes = self.limit_bytes / self._factor(position)
        token_bytes = self.token_bytes + self.score_bytes * n_seen + self.key_bytes
        room = max(0.0, limit_bytes - n_seen * self.key_bytes)
        root = math.sqrt(token_bytes**2 + 4 * self.score_bytes * room)
        most = max(MIN_CHUNK, int(min(2 * room / max(token_bytes + root, 1e-9), _MOST_TOKENS)))
        if self.stops_every is not None:
            most = min(most, self.stops_every - position % self.stops_every)
        return most

    def learn(self, n_tokens: int, position: int, n_bytes: int) -> None:
        """Learn that a chunk after `position` cached tokens took `n_bytes`.

        A short chunk counts as `_LEAST_LEARNED` tokens, and never lowers predictions. A chunk that
        the limit made short is learned like a long chunk.
        """
        predicted = self._formula(n_tokens, position)
        place, before = position.bit_length(), self._factor(position)
        is_short = n_tokens < _LEAST_LEARNED and 2 * before * predicted < self.limit_bytes
        if is_short:
            predicted = self._formula(_LEAST_LEARNED, position)
        factor = max(_LEAST_FACTOR, _MARGIN * n_bytes / max(predicted, 1.0))
        factor = min(factor, self.most_factor)
        if factor < before:
            if is_short:
                return
            is_guessed = place not in self._factors and n_tokens >= _LEAST_LEARNED
            factor = max(1.0, factor) if is_guessed else before - _EASING * (before - factor)
        self._factors = {**self._factors, place: factor}

    def _factor(self, position: int) -> float:
        factors, place = self._factors, position.bit_length()
        if place in factors:
            return factors[place]
        # If the formula was too low at another position, it may be even lower here.
        highest = max(factors.values(), default=0.0)
        return min(max(1.0, 2 * highest if highest > _MARGIN else highest), self.most_factor)

    def _formula(self, n_tokens: int, position: int) -> float:
        n_keys = self._seen(position) + n_tokens
        a_token = self.token_bytes + self.score_bytes * n_keys
        return n_tokens * a_token + n_keys * self.key_bytes

    def _seen(self, position: int) -> int:
        return position if self.window is None else min(position, self.window)


@dataclass(frozen=True)
class SequenceMemory:
    """The size of a token, and of a row without its tokens, from the shapes of a model's arrays.

    `windows` pairs a window, in tokens, with a token's bytes in all layers with that window.
    """

    token_bytes: int = 0
    row_bytes: int = 0
    windows: tuple[tuple[int, int], ...] = ()
    n_layers: int = 1
    n_arrays: int = 1
    """The number of arrays of a block and a checkpoint together."""
    prefill: PrefillMemory | None = None

    @classmethod
    def of(cls, spec: ModelCacheSpec, prefill: PrefillMemory | None) -> SequenceMemory:
        windows = (
            (window, sum(group.bytes_per_token for group in groups))
            for window, groups in spec.sliding.items()
        )
        states = sum(group.state_bytes for group in spec.recurrent)
        n_arrays = len(list(token_arrays(spec.groups, 1))) + len(list(state_arrays(spec.groups)))
        return cls(
            spec.bytes_per_token,
            states + GRID * spec.newest_bytes,
            tuple(windows),
            max(1, len(spec.template)),
            max(1, n_arrays),
            prefill,
        )

    def with_draft(self, draft: SequenceMemory) -> SequenceMemory:
        return replace(
            self,
            token_bytes=self.token_bytes + draft.token_bytes,
            row_bytes=self.row_bytes + draft.row_bytes,
            n_arrays=max(self.n_arrays, draft.n_arrays),
        )

    @property
    def chunk_bytes(self) -> int:
        """The memory limit of a chunk of a prompt."""
        return self.prefill.limit_bytes if self.prefill is not None else 0

    def caches_bytes(self, replies: Sequence[int], prompts: Sequence[int], more: int = 0) -> int:
        """Return the most bytes of the caches of sequences with the given lengths, in one batch.

        All rows of a batch are as long as the longest. `more`: further tokens per sequence.
        """
        n_rows = len(replies) + len(prompts)
        if not n_rows:
            return 0
        width = capacity(max(*replies, *prompts, 0) + more)
        windows = sum(
            n * (n_rows * min(window, width) + len(prompts) * min(CHECKPOINT_EVERY, width))
            for window, n in self.windows
        )
        return n_rows * (width * self.token_bytes + self.row_bytes) + windows

    def step_bytes(self, replies: Sequence[int], prompts: Sequence[int], more: int = 0) -> int:
        """Return the most bytes that a chunk or a step of replies takes besides the caches."""
        if self.prefill is None:
            return 0
        n_rows, longest = len(replies) + len(prompts), max(*replies, *prompts, 0, 0)
        shortest = self.prefill.peak_bytes(MIN_CHUNK, longest) if prompts else 0
        # When rows are added or removed, the batch is copied, one layer after the other.
        layers = 2 * self.caches_bytes(replies, prompts, more) // self.n_layers
        n_read = min(capacity(longest + more), longest * 4 // 3)  # up to a quarter is spare room
        dequantized = int(n_rows * n_read * self.prefill.key_bytes)
        return max(self.chunk_bytes, shortest, dequantized, layers)


def _activation_bytes(model: Any) -> tuple[int, int]:
    """Return the bytes of a token in the widest layer, and of a number in most floating weights.

    A matrix [..., out, in], packed or not, makes `out` numbers for each leading index. In a stack
    of experts, only the experts that are chosen for a token make numbers.
    """
    top_k = max(_arguments(model, _TOP_K), default=8)
    n_experts = set(_arguments(model, _EXPERTS))
    n_floats: Counter[int] = Counter()
    widths = [0]
    for layer in getattr(model, "layers", [model]):
        widths.append(0)
        # With several ranks, layers of other ranks are None.
        for path, module in layer.named_modules() if layer is not None else ():
            for name, array in module.items():
                if not isinstance(array, mx.array):
                    continue
                if mx.issubdtype(array.dtype, mx.floating):
                    n_floats[array.dtype.size] += array.size
                if array.ndim < 2 or name in ("scales", "biases"):
                    continue
                n_parts, is_known = array.shape[0], hasattr(module, "num_experts")
                if array.ndim == 3 and (is_known or (n_parts in n_experts and "att" not in path)):
                    widths[-1] += min(top_k, n_parts) * array.shape[1]
                else:
                    widths[-1] += math.prod(array.shape[:-1])
    itemsize = max(n_floats, key=n_floats.__getitem__, default=4)
    return _TIMES_WIDTHS * max(widths) * itemsize, itemsize


def _state_bytes(group: LayerGroup) -> int:
    """Return the bytes that a recurrent layer takes for a token.

    Metal has kernels for per-head states, [heads, ...], which take `_STEP_BYTES` for each head.
    """
    shape = max((shape for shape, _ in filter(None, group.states)), key=math.prod)
    if len(shape) == 3 and backend() == "metal":
        return shape[0] * _STEP_BYTES
    return (1 if len(shape) == 3 else _LOOPED_STATES) * 4 * math.prod(shape)


def _score_bytes(group: LayerGroup, n_heads: int, itemsize: int) -> int:
    """Return the bytes of scores and masks for a pair of token and key in one layer."""
    assert group.keys is not None and group.values is not None
    is_latent = group.keys.dim != group.values.dim  # then positions have separate scores
    if backend() == "cpu" or is_latent or group.keys.dim not in _FUSED_DIMS or itemsize > 2:
        return n_heads * (itemsize + 1) * (1 + is_latent)
    return itemsize  # only a mask, for all heads


def _arguments(model: Any, name: str) -> Iterator[int]:
    """Yield a model's integer arguments whose full names match the pattern `name`."""
    left: list[Any] = [getattr(model, "args", None), getattr(model, "config", None)]
    visited = list[Any]()
    while left:
        arguments = left.pop()
        if any(arguments is known_arguments for known_arguments in visited):
            continue
        visited.append(arguments)
        if not isinstance(arguments, dict):
            arguments = getattr(arguments, "__dict__", {})  # a model's own code may use any class
        for key, value in arguments.items():
            if isinstance(value, dict) or is_dataclass(value):
                left.append(value)
            elif re.fullmatch(name, str(key)):
                numbers = value if isinstance(value, list | tuple) else [value]
                yield from (n for n in numbers if isinstance(n, int))
