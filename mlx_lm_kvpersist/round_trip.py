"""The long numeric check: a tiny model gives the same results with our and mlx-lm's caches.

For reference, each sequence runs alone with mlx-lm's KVCache, over keys and values that
`mx.quantize` and `mx.dequantize` have rounded. On the live path, sequences join and leave batches.
Some are cancelled, stored, and restored from disk while other sequences decode.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
from mlx.utils import tree_flatten
from mlx_lm.generate import BatchGenerator
from mlx_lm.models import llama
from mlx_lm.models.cache import KVCache

from .cache.geometry.precision import KVPrecision, PrecisionChoice, Quantization, layout_in_words
from .cache.geometry.spec import probe_model
from .cache.live.attention import Strategy
from .cache.live.caches import PaddedBatch, batch_of
from .cache.live.packed import GRID
from .cache.live.rows import rows_of
from .cache.measuring.attention_check import plan_attention
from .errors import SelfTestFailed
from .host.hooks import REPLY, ModelSupport, PrefillLimits, Prompt
from .host.scheduling.batch_generator import plugin_batch_generator
from .host.scheduling.model_provider import PluginCaches
from .request.lookup import Lookup
from .request.model import LoadedModel
from .request.outcome import Kind
from .request.saver import RunningSequence
from .store.block_store import BlockStore, StoreLimits

_VOCAB = 64
_PROMPTS = {
    "cancelled": [i * 11 % 59 + 4 for i in range(12)],
    "long": [i * 7 % 61 + 2 for i in range(275)],
    "short": [i * 5 % 53 + 3 for i in range(21)],
    "late": [i * 3 % 47 + 5 for i in range(252)],
}
_CONTINUATION = [9, 8, 7, 6, 5]
_NOISE = 0.02
"""If float32 or TF32 sums change their order, logits of standard deviation 1.6 change by this."""
_SHARE_OF_ROUNDING = 0.5
_AMPLIFIED = 8
"""The largest factor by which two or three layers amplify an error of their keys and values."""

Precisions = Sequence[KVPrecision | None]
"""The quantizations of the layers; None for full precision."""


def check_round_trip(
    choice: PrecisionChoice, attention: Strategy | Literal["auto"] = "auto"
) -> None:
    """Check the live path in this precision, with one attention strategy, or the policy's choice.

    mlx-lm's attention must be patched. Raises SelfTestFailed if the live path is not taken or
    gives other logits, and ModelNotSupported if dequantizing is wrong on this device.
    """
    model = tiny_model(head_dim=max(64, choice.group_size or 0))
    spec = probe_model(model, choice)
    precisions = list(spec.precisions.values())
    allowed: Precisions = choice.candidates() or [None]
    if precisions not in [[each, each] for each in allowed]:
        raise SelfTestFailed(f"the tiny model's cache is {spec.layout}, expected {choice}")
    spec = plan_attention(model, spec, attention)
    limits = PrefillLimits(max_stall_s=60.0, most_tokens=lambda position: GRID * 2)
    support = ModelSupport(spec.make_cache, batch_of, rows_of, limits=limits)
    model.make_cache = PluginCaches(model, "kvpersist", support)
    with tempfile.TemporaryDirectory() as folder:
        store = BlockStore(Path(folder), StoreLimits(1 << 30, 1 << 30))
        try:
            sequences = _run(LoadedModel(model, None, spec, "selftest", None), store)
        except SelfTestFailed:
            raise
        except Exception as error:
            raise SelfTestFailed(f"the live path fails: {type(error).__name__}: {error}") from error
        finally:
            store.close()
    references = [_reference(model, sequence.ids, precisions) for sequence in sequences]
    rounding = _rounding(model, precisions, sequences[0].ids, references[0])
    for sequence, reference in zip(sequences, references, strict=True):
        # The live path and the reference round equally, except a few numbers near a rounding step:
        # there the order of a sum decides. This error is a share of the rounding error.
        share = _SHARE_OF_ROUNDING if len(sequence.ids) > GRID else 0.0
        tolerance = _NOISE + share * rounding
        expected = reference[mx.array(list(sequence.logprobs)) - 1]
        logprobs = mx.stack(list(sequence.logprobs.values()))
        worst = float(mx.sqrt(mx.square(logprobs - expected).mean(axis=1)).max())
        if not worst <= tolerance:
            raise SelfTestFailed(
                f"the logits of the {sequence.name} sequence differ by {worst:.2g} from those of "
                f"mlx-lm's own caches in {layout_in_words(spec.layout)}, expected at most "
                f"{tolerance:.2g}"
            )


class _RoundedKVCache(KVCache):  # type: ignore[misc]
    """mlx-lm's own cache with all tokens twice: first rounded keys and values, then exact ones.

    A query sees exact tokens in its own block of the grid, and rounded tokens in earlier blocks.
    """

    def __init__(self, precision: KVPrecision) -> None:
        super().__init__()
        self.precision, self.computed = precision, KVCache()

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        rounded = super().update_and_fetch(
            _rounded(keys, self.precision.keys), _rounded(values, self.precision.values)
        )
        computed = self.computed.update_and_fetch(keys, values)
        pairs = zip(rounded, computed, strict=True)
        all_keys, all_values = (mx.concatenate(list(pair), axis=2) for pair in pairs)
        return all_keys, all_values

    def make_mask(self, N: int, **kwargs: Any) -> mx.array:
        at, keys = mx.arange(self.offset, self.offset + N)[:, None], mx.arange(self.offset + N)
        is_own = at // GRID == keys // GRID
        older, own = keys // GRID < at // GRID, is_own & (keys <= at)
        return mx.concatenate([older, own], axis=1)


def _rounded(x: mx.array, quantization: Quantization) -> mx.array:
    """Quantize and dequantize `x` [B, H, T, 2**k]; the Hadamard transform is its own inverse."""
    size, bits = quantization.group_size, quantization.bits
    x = mx.hadamard_transform(x) if quantization.rotated else x
    weights, *scales_and_biases = mx.quantize(x, group_size=size, bits=bits)
    scales, biases = (y.astype(mx.bfloat16).astype(mx.float32) for y in scales_and_biases)
    x = mx.dequantize(weights, scales, biases, group_size=size, bits=bits)
    return mx.hadamard_transform(x) if quantization.rotated else x


@dataclass(eq=False)
class _Sequence:
    """The ids of a sequence, its log-probabilities [_VOCAB] by index in `ids`, its last caches."""

    name: str
    ids: list[int]
    logprobs: dict[int, mx.array] = field(default_factory=dict)
    caches: list[Any] | None = None


class _Batch:
    def __init__(self, model: Any) -> None:
        stream = mx.default_stream(mx.default_device())
        self.generator = plugin_batch_generator(BatchGenerator)(model, stream=stream)
        self.running: dict[int, _Sequence] = {}

    def add(self, sequence: _Sequence, n_new: int, caches: list[Any] | None = None) -> int:
        n_held = caches[0].offset if caches else 0
        (uid,) = self.generator.insert(
            [sequence.ids[n_held:]], [n_new], [caches], [sequence.ids[:n_held]]
        )
        self.running[uid] = sequence
        return int(uid)

    def step(self) -> None:
        _, responses = self.generator.next()
        batch = self.generator.replies.prompt_cache
        if batch and not isinstance(batch[0], PaddedBatch):
            raise SelfTestFailed(f"the live batch is a {type(batch[0]).__name__}, and none of ours")
        for response in responses:
            sequence = self.running[response.uid]
            sequence.logprobs[len(sequence.ids)] = response.logprobs
            sequence.ids.append(response.token)
            if response.finish_reason is not None:
                sequence.caches = response.prompt_cache
                del self.running[response.uid]

    def until_ended(self, sequence: _Sequence) -> None:
        while sequence in self.running.values():
            self.step()


def _run(loaded: LoadedModel, store: BlockStore) -> list[_Sequence]:
    batch = _Batch(loaded.model)
    cancelled, long, short, late = (_Sequence(name, list(ids)) for name, ids in _PROMPTS.items())
    batch.add(long, 14)
    batch.step()  # alone, so that one chunk ends in another block of the grid
    uid = batch.add(cancelled, 20)
    batch.add(short, 4)
    for _ in range(4):
        batch.step()
    batch.generator.remove([uid])
    del batch.running[uid]
    batch.until_ended(short)
    restored = _restored(short, loaded, store, canary=False)
    batch.add(late, 9)  # continues into another block of the grid
    batch.add(short, 9, restored)
    for sequence in (long, short, late):
        batch.until_ended(sequence)
    batch.add(long, 4, _restored(long, loaded, store, canary=True))
    batch.until_ended(long)
    batch.generator.close()
    return [long, cancelled, short, late]


def _restored(
    sequence: _Sequence, loaded: LoadedModel, store: BlockStore, *, canary: bool
) -> list[Any]:
    """Store a sequence that has ended; return its caches from disk, ready for more ids."""
    assert sequence.caches is not None
    running = RunningSequence(loaded.root, len(_PROMPTS[sequence.name]))
    loaded.save(running, sequence.ids, sequence.caches, REPLY, store)
    sequence.caches = None
    store.drain()
    store.pool.clear()
    n_stored = len(sequence.ids)
    sequence.ids += _CONTINUATION
    prompt = Prompt(sequence.ids, [sequence.ids], ["user"])
    reuse = Lookup(prompt, loaded.root, store, loaded, canary=canary).restore()
    outcome = reuse.outcome
    if not reuse.caches or outcome.kind is not Kind.EXTEND or outcome.n_reused != n_stored:
        raise SelfTestFailed(
            f"{outcome.n_reused} of {n_stored} stored tokens were restored: {outcome}"
        )
    return reuse.caches


def _reference(model: Any, ids: list[int], precisions: Precisions) -> mx.array:
    """Return the log-probabilities [len(ids), _VOCAB] that mlx-lm's own caches give."""
    caches = [
        KVCache() if precision is None else _RoundedKVCache(precision) for precision in precisions
    ]
    logits: mx.array = model(mx.array([ids]), cache=caches)[0]
    logits = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    mx.eval(logits)
    return logits


def _rounding(model: Any, precisions: Precisions, ids: list[int], rounded: mx.array) -> float:
    """Return how much rounded keys and values change logits, as a root mean square.

    `ids` are longer than a block of the grid; `rounded` is their reference. Raises SelfTestFailed
    if the change is more than the bits explain: 64 normal numbers span 5 deviations, so each is
    rounded by 5 / sqrt(12) / (2^bits - 1) deviations.
    """
    quantized = [precision for precision in precisions if precision is not None]
    if not quantized:
        return 0.0
    exact = _reference(model, ids, [None] * len(precisions))
    # Queries in the first block see no rounded tokens.
    rounding = float(mx.sqrt(mx.square(rounded - exact)[GRID:].mean()))
    steps = 2 ** min(min(precision.keys.bits, precision.values.bits) for precision in quantized) - 1
    expected = _AMPLIFIED * 5 / math.sqrt(12) / steps * float(mx.std(exact))
    if not rounding <= expected:
        raise SelfTestFailed(
            f"MLX rounds keys and values to {', '.join(map(str, quantized))} with an error of "
            f"{rounding:.2g} in the logits, expected at most {expected:.2g}"
        )
    return rounding


def tiny_model(seed: int = 7, head_dim: int = 64, n_layers: int = 2) -> Any:
    """Return a llama with random weights, whose output depends on its attention."""
    args = llama.ModelArgs(
        model_type="llama",
        hidden_size=64,
        num_hidden_layers=n_layers,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        rms_norm_eps=1e-5,
        vocab_size=_VOCAB,
        tie_word_embeddings=False,
    )
    key = mx.random.key(seed)
    model = llama.Model(args)
    weights = []
    for name, value in tree_flatten(model.parameters()):
        key, sub = mx.random.split(key)
        weights.append((name, mx.random.normal(value.shape, key=sub) * 0.2 + ("norm" in name)))
    model.load_weights(weights)
    mx.eval(model.parameters())
    return model
