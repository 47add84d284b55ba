"""Sequences that join, finish and are cancelled in mlx-lm's own batch generator."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator, generate_step
from mlx_lm.models.cache import KVCache

from mlx_lm_kvpersist.cache.geometry.precision import KVPrecision
from mlx_lm_kvpersist.cache.live.attention import AttentionPlan, forced_plan
from mlx_lm_kvpersist.cache.live.caches import (
    BatchQuantizedKVCache,
    SequenceQuantizedKVCache,
)
from mlx_lm_kvpersist.cache.measuring.attention_check import observed_attention
from mlx_lm_kvpersist.cli.quality_checks import server_attention

from ..conftest import ARCHITECTURES, VOCAB, tiny_gemma3

MODELS: dict[str, Callable[[], Any]] = {**ARCHITECTURES, "gemma3": tiny_gemma3}
PRECISION = KVPrecision.of(4, 32)
MAX_TOKENS = 8
TIE = 2e-3
"""Tokens with log-probabilities this close may swap between batch shapes: float32 sums differ in
order, and a difference that crosses a rounding step of 4 bits grows."""


@dataclass(frozen=True)
class Alone:
    """The result of one prompt that runs alone."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[list[float]]

    def agrees_with(self, tokens: Sequence[int]) -> bool:
        """Return whether `tokens` equal the expected tokens up to the first tie."""
        for step, (actual, expected) in enumerate(zip(tokens, self.tokens, strict=False)):
            if actual != expected:
                logprobs = self.logprobs[step]
                return logprobs[expected] - logprobs[actual] < TIE
        return True


def run_alone(model: Any, prompt: list[int]) -> Alone:
    steps = list(
        generate_step(
            mx.array(prompt), model, max_tokens=MAX_TOKENS, prompt_cache=model.make_cache()
        )
    )
    logprobs: list[list[float]] = [logprobs.tolist() for _, logprobs in steps]
    return Alone(prompt, [int(token) for token, _ in steps], logprobs)


class Setup:
    """A model with quantized caches, and a pool of prompts with their results alone.

    A prompt alone reads arrays of keys; in the batch, layers attend by `plan` if it is set.
    """

    def __init__(self, architecture: str) -> None:
        self.model = MODELS[architecture]()
        self.model.make_cache = self.make_caches
        self.plan: AttentionPlan | None = None
        rng = random.Random(1)
        prompts = [
            [rng.randrange(VOCAB) for _ in range(rng.choice([1, 2, 3, 5, 9, 17, 26]))]
            for _ in range(24)
        ]
        self.pool = [run_alone(self.model, prompt) for prompt in prompts]

    def make_caches(self) -> list[Any]:
        """Return the model's own caches, with a quantized cache for each KVCache."""
        own = getattr(type(self.model), "make_cache", None)
        caches = own(self.model) if own else [KVCache() for _ in self.model.layers]
        return [
            SequenceQuantizedKVCache(PRECISION, self.plan) if type(cache) is KVCache else cache
            for cache in caches
        ]

    def prefix_cache(self, prompt: list[int]) -> list[Any]:
        caches: list[Any] = self.model.make_cache()
        self.model(mx.array([prompt]), cache=caches)
        return caches

    def run(self, seed: int) -> int:
        """Run one random schedule; return how many of its sequences went wrong."""
        rng = random.Random(seed)
        generator = BatchGenerator(
            self.model,
            completion_batch_size=rng.choice([2, 4]),
            prefill_batch_size=1,  # as in the server
            prefill_step_size=rng.choice([4, 16]),
        )
        arrivals = sorted(rng.randint(0, 6) for _ in range(rng.randint(2, 4)))
        alone: dict[int, Alone] = {}
        limits: dict[int, int] = {}
        replies: dict[int, list[int]] = {}
        running: set[int] = set()
        n_bad = 0
        for step in range(200):
            while arrivals and arrivals[0] <= step:
                arrivals.pop(0)
                expected = rng.choice(self.pool)
                uid = self.insert(generator, rng, expected, limit := rng.randint(1, MAX_TOKENS))
                alone[uid], limits[uid], replies[uid] = expected, limit, []
                running.add(uid)
            if running and rng.random() < 0.05:
                uid = rng.choice(sorted(running))
                generator.remove([uid])
                running.remove(uid)
            if not running and not arrivals:
                break
            _, responses = generator.next()
            for response in responses:
                replies[response.uid].append(response.token)
                if response.finish_reason is not None:
                    running.remove(response.uid)
                    n_cached = {cache.offset for cache in response.prompt_cache}
                    n_bad += n_cached != {len(response.all_tokens)}
                    n_bad += len(replies[response.uid]) != limits[response.uid]
        assert not running
        generator.close()
        return n_bad + sum(not alone[uid].agrees_with(replies[uid]) for uid in replies)

    def insert(
        self, generator: BatchGenerator, rng: random.Random, expected: Alone, limit: int
    ) -> int:
        prompt = list(expected.prompt)
        cached_ids: list[int] = []
        caches = None
        if len(prompt) > 2 and rng.random() < 0.4:
            cut = rng.randint(1, len(prompt) - 1)
            cached_ids, prompt = prompt[:cut], prompt[cut:]
            caches = [self.prefix_cache(cached_ids)]
        cut = rng.randint(0, len(prompt) - 1)
        segments = [prompt[:cut], prompt[cut:]] if cut else [prompt]
        (uid,) = generator.insert_segments(
            [segments], max_tokens=[limit], caches=caches, all_tokens=[cached_ids]
        )
        return int(uid)


@pytest.fixture(scope="module")
def setup(request: pytest.FixtureRequest) -> Setup:
    return Setup(request.param)


N_SCHEDULES = {"llama": (12, 200), "qwen3": (6, 50), "deepseek_v2": (6, 50), "gemma3": (6, 50)}
"""Numbers of schedules by default, and in the slow tests."""


@pytest.mark.parametrize(
    ("setup", "n_schedules"),
    [
        *((name, few) for name, (few, _) in N_SCHEDULES.items()),
        *(
            pytest.param(name, many, marks=pytest.mark.slow)
            for name, (_, many) in N_SCHEDULES.items()
        ),
    ],
    indirect=["setup"],
)
def test_batched_sequences_give_the_same_tokens_as_alone(setup: Setup, n_schedules: int) -> None:
    bad = {seed: n for seed in range(n_schedules) if (n := setup.run(seed))}
    assert not bad


# --- the same schedules, attending over packed keys


@pytest.fixture
def patched() -> Iterator[None]:
    with server_attention():
        yield


PLANS = {
    "packed": forced_plan("packed"),
    "tiled": replace(forced_plan("tiled"), max_dequantized_bytes=1),  # by heads
    "mixed": AttentionPlan("packed", most_queries=1, least_rows=3, can_take_packed=True),
}


@pytest.mark.parametrize("plan", list(PLANS))
@pytest.mark.parametrize("setup", list(MODELS), indirect=True)
def test_attention_plans_change_no_token(
    setup: Setup, plan: str, patched: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "plan", PLANS[plan])
    with observed_attention() as calls:
        bad = {seed: n for seed in range(2) if (n := setup.run(seed))}
    assert len(calls) > 20 and not bad


# --- the same schedules with faulty caches, to show that the tests above can fail


class NoMask(BatchQuantizedKVCache):
    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> str | None:
        return None if N == 1 else "causal"


class OneTooLong(SequenceQuantizedKVCache):
    """A cache that merges as if it had one more token."""

    @classmethod
    def merge(cls, caches: Sequence[Any]) -> BatchQuantizedKVCache:
        batch = super().merge(caches)
        batch._place(batch._padding, batch._idx + 1)
        return batch


def merging_into(batch_class: type[BatchQuantizedKVCache]) -> type[SequenceQuantizedKVCache]:
    class Faulty(SequenceQuantizedKVCache):
        @classmethod
        def merge(cls, caches: Sequence[Any]) -> BatchQuantizedKVCache:
            return batch_class.merge(caches)

    return Faulty


@pytest.mark.parametrize("setup", ["llama"], indirect=True)
@pytest.mark.parametrize(
    "faulty",
    [merging_into(NoMask), OneTooLong],
    ids=["mask", "length"],
)
def test_schedules_detect_faulty_batch_caches(
    setup: Setup, faulty: type[SequenceQuantizedKVCache], monkeypatch: pytest.MonkeyPatch
) -> None:
    def make_cache() -> list[SequenceQuantizedKVCache]:
        return [faulty(PRECISION) for _ in setup.model.layers]

    monkeypatch.setattr(setup.model, "make_cache", make_cache)
    assert sum(setup.run(seed) for seed in range(24)) > 2
