"""How much memory the next chunk of a prompt takes: by a formula, corrected by real chunks."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

import mlx.core as mx

from ..geometry.spec import LayerGroup, ModelCacheSpec
from ..live.packed import GRID
from ..live.policy import backend

MIN_CHUNK = 32
"""Tokens that are computed at once however little memory there is."""

CHECKPOINT_EVERY = 2048
"""While a prompt is computed, a model with windows or states gets a checkpoint after each of these
numbers of tokens."""

_MOST_TOKENS = 1 << 16

_TIMES_WIDTHS = 2
"""A layer's memory, relative to the outputs of its matrices: norms, rotations and activations make
arrays of the same widths."""

_STEP_BYTES = 7 * 256 * 4
"""`ssm_attn` of mlx-lm computes 256 tokens at once, in about seven arrays [heads, 256, 256] of
float32."""

_LOOPED_STATES = 4
"""Mamba and Jamba loop over the tokens; these arrays of float32 states live at one time."""

_FUSED_DIMS = (64, 80, 128)
"""Head dims for which every GPU has a fused kernel, in 16 bits."""

_HEADS = r"(num_attention|num|num_query|n)_heads?"
_TOP_K = r"num_experts_per_tok(en)?|top_k_experts|moe_(top_?)?k"
_EXPERTS = r"(n|num|moe_num)_(routed_|local_)?experts"
_SUPPOSED_HEADS, _SUPPOSED_TOP_K = 64, 8
"""For a model whose arguments do not tell."""

_LEAST_LEARNED = 256
"""Shorter chunks are mostly overhead, which does not grow with their tokens."""

_MARGIN, _EASING = 1.1, 0.1
"""Peaks of equal chunks differ by some percent. A prediction that was too high falls by a tenth of
the difference with each chunk."""


class PrefillMemory:
    """Bytes that a chunk takes beside the model and the caches, and the limit for them.

    `token_bytes` are one layer's activations, for each token. `score_bytes` are the scores of
    attention that is not fused, for each pair of token and key. `key_bytes` are one layer's
    dequantized keys and values, for each key, cached or new. No layer sees more than `window`
    cached keys; None: some layer sees all of them. With `stops_every`, chunks end at its multiples,
    at which a checkpoint is made.

    The generation thread learns; any thread may ask.
    """

    def __init__(
        self,
        token_bytes: float,
        score_bytes: float,
        key_bytes: float,
        limit_bytes: int,
        stops_every: int | None = None,
        window: int | None = None,
    ) -> None:
        self.token_bytes, self.score_bytes, self.key_bytes = token_bytes, score_bytes, key_bytes
        self.limit_bytes, self.stops_every, self.window = limit_bytes, stops_every, window
        self._factors: Mapping[int, float] = {}
        """By the power of two of the position: what chunks took, relative to the formula. Replaced,
        never changed: other threads iterate over it."""

    @classmethod
    def of(cls, model: Any, spec: ModelCacheSpec, limit_bytes: int) -> PrefillMemory:
        """Return that of a model by the shapes of its parameters; nothing is evaluated.

        On the CPU, 136 architectures of mlx-lm take RATIO of it: `tests/models_check` compares.
        """
        whole = [group for group in spec.groups if group.keys is not None]
        heads = max(_arguments(model, _HEADS), default=_SUPPOSED_HEADS)
        token_bytes, itemsize = _activation_bytes(model)
        score_bytes = max((_score_bytes(group, heads, itemsize) for group in whole), default=0)
        key_bytes = max((g.full_precision_bytes // len(g.slots) for g in spec.full), default=0)
        if spec.quantized and backend() != "cpu":
            # A GPU copies the dequantized keys and values for each block of the grid that a chunk
            # ends in, since the attention before may still read them.
            score_bytes = max(score_bytes, key_bytes / GRID)
        token_bytes += max(map(_state_bytes, spec.recurrent), default=0)
        stops_every = None if spec.any_prefix else CHECKPOINT_EVERY
        window = None if spec.full else max(spec.sliding, default=0)
        return cls(token_bytes, score_bytes, key_bytes, limit_bytes, stops_every, window)

    def peak_bytes(self, n_tokens: int, position: int) -> int:
        """Return the most bytes that a chunk after `position` cached tokens takes."""
        return int(self._factor(position) * self._formula(n_tokens, position))

    def most_tokens(self, position: int) -> int:
        """Return the longest chunk after `position` cached tokens that stays within the limit."""
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

        Predictions rise at once and fall slowly. A short chunk, unless the limit made it short, is
        mostly overhead: it never lowers predictions, and raises them only if it took more than
        longer chunks should.
        """
        told = self._formula(n_tokens, position)
        is_short = n_tokens < _LEAST_LEARNED and 2 * told < self.limit_bytes
        if is_short:
            told = self._formula(_LEAST_LEARNED, position)
        factor, before = _MARGIN * n_bytes / max(told, 1.0), self._factor(position)
        if factor < before:
            factor = before if is_short else before - _EASING * (before - factor)
        if factor != before:
            self._factors = {**self._factors, position.bit_length(): factor}

    def _factor(self, position: int) -> float:
        """Return that of this place; the highest known one at a place where none is."""
        factors = self._factors
        known = factors.get(position.bit_length())
        return max([1.0, *factors.values()]) if known is None else known

    def _formula(self, n_tokens: int, position: int) -> float:
        n_keys = self._seen(position) + n_tokens
        a_token = self.token_bytes + self.score_bytes * n_keys
        return n_tokens * a_token + n_keys * self.key_bytes

    def _seen(self, position: int) -> int:
        return position if self.window is None else min(position, self.window)


def _activation_bytes(model: Any) -> tuple[int, int]:
    """Return a token's bytes in the widest layer, and the bytes of one number.

    The numbers are of the dtype that most of the weights, or their scales, have.
    """
    top_k = max(_arguments(model, _TOP_K), default=_SUPPOSED_TOP_K)
    n_experts = set(_arguments(model, _EXPERTS))
    n_floats: Counter[int] = Counter()
    widest = 0
    for layer in getattr(model, "layers", [model]):
        width = 0
        # A rank of several has None at the layers of other ranks.
        for path, module in layer.named_modules() if layer is not None else ():
            for name, array in module.items():
                if not isinstance(array, mx.array):
                    continue
                if mx.issubdtype(array.dtype, mx.floating):
                    n_floats[array.dtype.size] += array.size
                if name not in ("scales", "biases"):
                    is_stack = array.ndim == 3 and (
                        hasattr(module, "num_experts")
                        or (array.shape[0] in n_experts and "att" not in path)
                    )
                    width += _width(array.shape, top_k if is_stack else None)
        widest = max(widest, width)
    itemsize = max(n_floats, key=n_floats.__getitem__, default=4)
    return _TIMES_WIDTHS * widest * itemsize, itemsize


def _width(shape: Sequence[int], top_k: int | None) -> int:
    """Return how many numbers a matrix [..., out, in], packed or not, makes of a token.

    A token goes to `top_k` of the experts of a stack [experts, out, in].
    """
    if len(shape) < 2:
        return 0
    return math.prod(shape[:-1]) if top_k is None else min(top_k, shape[0]) * shape[1]


def _state_bytes(group: LayerGroup) -> int:
    """Return the bytes that a recurrent layer takes for each token of a chunk, beside its widths.

    A layer without a kernel makes a state for each token, and a loop over these holds several.
    """
    shape = max((shape for shape, _ in filter(None, group.states)), key=math.prod)
    if len(shape) < 3:
        return _LOOPED_STATES * 4 * math.prod(shape)
    # Metal has kernels for states of heads.
    return shape[0] * _STEP_BYTES if backend() == "metal" else 4 * math.prod(shape)


def _score_bytes(group: LayerGroup, heads: int, itemsize: int) -> float:
    """Return the bytes of the scores and masks of a token and a key in a layer of these `heads`."""
    assert group.keys is not None and group.values is not None
    is_latent = group.keys.dim != group.values.dim  # scores of positions are added to the others
    if backend() == "cpu" or is_latent or group.keys.dim not in _FUSED_DIMS or itemsize > 2:
        return heads * (itemsize + 1) * (1 + is_latent)
    return itemsize  # a mask alone, with an element for all heads


def _arguments(model: Any, name: str) -> Iterator[int]:
    """Yield the numbers among a model's arguments whose whole name is like the pattern `name`."""
    left = [getattr(model, "args", None), getattr(model, "config", None)]
    while left:
        arguments = left.pop()
        for key, value in getattr(arguments, "__dict__", arguments or {}).items():
            if isinstance(value, dict) or is_dataclass(value):
                left.append(value)
            elif re.fullmatch(name, key):
                numbers = value if isinstance(value, list | tuple) else [value]
                yield from (n for n in numbers if isinstance(n, int))
