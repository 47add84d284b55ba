"""Draft tokens: replies are the same as without them, and caches have exactly their tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from importlib import import_module
from itertools import count
from types import ModuleType, SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from mlx_lm_kvpersist.cache.geometry.kinds import end_on_grid, most_taken_back
from mlx_lm_kvpersist.cache.geometry.precision import KVPrecision, PrecisionChoice
from mlx_lm_kvpersist.cache.geometry.spec import probe_model
from mlx_lm_kvpersist.cache.live.caches import SequenceQuantizedKVCache, batch_of
from mlx_lm_kvpersist.cli.quality_checks import server_attention
from mlx_lm_kvpersist.host.hooks import ModelSupport, PrefillLimits, TakenRequest
from mlx_lm_kvpersist.host.manager import Taken, TakenTokens
from mlx_lm_kvpersist.host.patching.probes import ProbeModel
from mlx_lm_kvpersist.host.scheduling import prompt_lookup
from mlx_lm_kvpersist.host.scheduling.model_provider import PluginCaches
from mlx_lm_kvpersist.host.scheduling.prompt_lookup import PromptLookup
from models_check.build import build

from .test_prefill import Counting, Plugin, Saving, Serving, right_answer

stock: Any = import_module("mlx_lm.generate")
WORDS = 40
"""Ids of the vocabulary."""


class Scripted:
    """A model that says the next id of a script; its keys are the ids it has read."""

    layers = (None,)

    def __init__(self, script: list[int]) -> None:
        self.script = script
        self.n_read: list[int] = []

    def __call__(self, ids: mx.array, cache: list[Any]) -> mx.array:
        start, n = cache[0].size(), ids.shape[1]
        self.n_read.append(n)
        keys = mx.broadcast_to(ids[:, None, :, None], (len(ids), 1, n, 32)).astype(mx.float32)
        cache[0].update_and_fetch(keys, keys)
        follow = mx.array(self.script[start + 1 : start + n + 1])
        return mx.where(mx.arange(WORDS) == follow[:, None], 9.0, 0.0)[None]


def repeating(seed: int, n: int) -> list[int]:
    """Return ids that often repeat what came before, exactly or nearly."""
    rng, ids = random.Random(seed), [1, 2, 3, 4, 5]
    while len(ids) < n:
        at, length = rng.randrange(len(ids) - 4), rng.choice((1, 5, 12, 40))
        ids += ids[at : at + length]
        ids.append(rng.randrange(WORDS - 1))
    return ids[:n]


def begun(model: Scripted, n_prompt: int, n_reply: int, quantized: bool, stop: int | None) -> Any:
    """Return stock's batch of one reply whose prompt was computed except its last id."""
    row: Any = SequenceQuantizedKVCache(KVPrecision.of(8, 32)) if quantized else KVCache()
    return batch_of_one(model, model.script[:n_prompt], [row], n_reply, stop)


def batch_of_one(
    model: Any, prompt: list[int], row: list[Any], n_reply: int, stop: int | None = None
) -> Any:
    model(mx.array([prompt[:-1]]), row)
    return batch_of_rows(model, [prompt], [row], n_reply, stop)


def batch_of_rows(
    model: Any, prompts: list[list[int]], rows: list[list[Any]], n_reply: int, stop: int | None
) -> Any:
    """Return stock's batch of replies whose prompts were computed except their last ids."""
    n, sequences = len(prompts), [[stop]] if stop is not None else []
    if hasattr(stock, "StopSequences"):
        stops = {"stop_sequences": [stock.StopSequences(sequences) for _ in prompts]}
    else:  # 0.31.3
        ends = {"normal": [(one, None) for one in sequences]} if sequences else {}
        machines = [stock.SequenceStateMachine(ends, initial="normal") for _ in prompts]
        stops = {"state_machines": machines}
    return stock.GenerationBatch(
        model=model,
        uids=list(range(7, 7 + n)),
        inputs=mx.array([prompt[-1] for prompt in prompts]),
        prompt_cache=[
            batch_of(layer) or layer[0].merge(layer) for layer in zip(*rows, strict=True)
        ],
        tokens=[list(prompt[:-1]) for prompt in prompts],
        samplers=[None] * n,
        fallback_sampler=lambda logprobs: mx.argmax(logprobs, axis=-1),
        logits_processors=[[] for _ in prompts],
        max_tokens=[n_reply] * n,
        **stops,
    )


def all_of(batch: Any, steps: Any) -> list[Any]:
    told: list[Any] = []
    while len(batch):
        told += steps(batch)
    return told


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_a_reply_is_that_of_one_token_at_a_time(
    seed: int, quantized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_lookup, "MOST_CREDIT", 1e9)  # even wrong drafts are continued
    rng = random.Random(seed)
    script = repeating(seed, 900)
    n_prompt, n_reply = rng.randrange(8, 400), rng.randrange(1, 400)
    stop = rng.choice((None, script[n_prompt + n_reply // 2]))
    plain, guessing = Scripted(script), Scripted(script)
    expected = all_of(begun(plain, n_prompt, n_reply, quantized, stop), lambda one: one.next())
    made = PromptLookup(most_taken_back)
    made._gain = 1e9
    batch = begun(guessing, n_prompt, n_reply, quantized, stop)
    told = all_of(batch, lambda one: made.next(one)[0])

    def said(one: Any) -> tuple[Any, ...]:
        return one.uid, one.token, one.finish_reason, one.all_tokens

    assert list(map(said, told)) == list(map(said, expected))
    for one, other in zip(told, expected, strict=True):
        assert mx.array_equal(one.logprobs, other.logprobs)
    end, other = told[-1].prompt_cache[0], expected[-1].prompt_cache[0]
    assert end.size() == len(told[-1].all_tokens) == other.size()
    assert (
        all(map(mx.array_equal, end.keys_and_values(), other.keys_and_values()))
        if (quantized)
        else mx.array_equal(end.keys[:, :, : end.offset], other.keys[:, :, : end.offset])
    )


def test_what_repeats_takes_fewer_calls_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(perf_counter=count().__next__)  # no step is slow
    monkeypatch.setattr(prompt_lookup, "time", clock)
    script = [*range(1, 31), *range(1, 31), *range(1, 31)]
    model, made = Scripted(script), PromptLookup(most_taken_back)
    batch = begun(model, 36, 50, False, None)
    model.n_read.clear()
    all_of(batch, lambda one: made.next(one)[0])
    assert len(model.n_read) < 15 and max(model.n_read) > 8


def test_wrong_guesses_are_paid_off_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes a second here, a step with a draft three, and each draft is wrong."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(prompt_lookup, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    made, n_guesses = PromptLookup(most_taken_back), 0
    batch = begun(Scripted([1, 2, 3, 4, 5] * 400), 20, 900, False, None)
    stock_step = batch.next

    def step() -> Any:
        clock.now += 1.0
        return stock_step()

    def wrong(batch: Any, ids: list[int]) -> Any:
        clock.now += 2.0
        return batch.next()

    batch.next = step
    monkeypatch.setattr(prompt_lookup, "checked", wrong)
    while len(batch):
        n_guesses += made.next(batch)[1]
    assert 3 <= n_guesses <= 6
    assert clock.now <= 900 * 1.03


@pytest.mark.parametrize("change", ["nothing", "a processor", "another reply", "no room"])
def test_only_a_single_reply_without_processors_is_guessed(change: str) -> None:
    """And a draft has only as many tokens as the caches can take back."""
    script = [1, 2, 3, 4, 5] * 40
    batch = begun(Scripted(script), 20, 30, False, None)
    made = PromptLookup(lambda caches: 1 if change == "no room" else most_taken_back(caches))
    made._step_s = 1e9
    if change == "a processor":
        batch.logits_processors = [[lambda ids, logits: logits]]
    if change == "another reply":
        batch.extend(begun(Scripted(script), 20, 30, False, None))
    assert made.next(batch)[1] == (change == "nothing")


@pytest.mark.parametrize("choice", [PrecisionChoice(16, 16), PrecisionChoice()])
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_a_real_model_goes_on_as_it_would(family: str, choice: PrecisionChoice) -> None:
    """Over the ends of blocks, where drafts are shortened."""
    model = build(family)
    end_on_grid(model)
    with server_attention():
        spec = probe_model(model, choice)
        rng = random.Random(3)
        prompt = [rng.randrange(1, 60) for _ in range(200)]
        plain = all_of(batch_of_one(model, prompt, spec.make_cache(), 400), lambda one: one.next())
        # The reply, with faults, is given as a passage that the model has read.
        said = [one.token for one in plain]
        faulty = [id_ if rng.random() < 0.9 else (id_ + 1) % 60 for id_ in said]
        made = PromptLookup(most_taken_back)
        made._gain, made._step_s = 1e9, 1e9
        seen = prompt_lookup.Occurrences(7, [*prompt[:-1]])
        seen.after = lambda run, n: faulty[len(seen.ids) - 199 :][:n]  # type: ignore[method-assign]
        batch = batch_of_one(model, prompt, spec.make_cache(), 400)
        seen.ids = batch.tokens[0]
        made._occurrences = seen
        told = all_of(batch, lambda one: made.next(one)[0])
    assert [one.token for one in told] == said


def test_a_sampler_is_asked_for_one_token_at_a_time() -> None:
    """XTC draws one random number a call, and in older versions compares all rows with it."""
    script, shapes = [1, 2, 3, 4, 5] * 40, set()
    batch, made = begun(Scripted(script), 20, 30, False, None), PromptLookup(most_taken_back)

    def sample(logprobs: mx.array) -> mx.array:
        shapes.add(logprobs.shape)
        return mx.argmax(logprobs, axis=-1)

    batch.samplers = [sample]
    told = all_of(batch, lambda one: made.next(one)[0])
    assert shapes == {(1, WORDS)} and [one.token for one in told] == script[20:50]


class Counted(Saving):
    """A request whose plugin has drafts: the next numbers, and then a wrong number."""

    def draft_ids(self, run: Sequence[int], n: int) -> list[int]:
        return [*range(run[-1] + 1, run[-1] + n), 7]


@pytest.mark.parametrize("place", ["model", "end"])
def test_a_draft_that_fails_half_way_ends_its_reply_and_leaves_nothing(
    place: str, patched_server: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the model, whose caches then have the draft's tokens, or at an end in the draft."""

    class Failing(Counting):
        def __call__(self, ids: mx.array, cache: list[Any]) -> mx.array:
            logits = super().__call__(ids, cache)
            if place == "model" and 1 < ids.shape[1] < 18 and int(ids[0, 0]) >= 1020:
                raise RuntimeError("bad luck")
            return logits

    monkeypatch.setattr("tests.host.scheduling.test_prefill.Saving", Counted)
    plugin, model = Plugin(PrefillLimits(1.0, lambda position: 64)), Failing()
    support = ModelSupport(list, batch_of, limits=plugin.limits, most_taken_back=most_taken_back)
    model.make_cache = PluginCaches(model, "saves", support)
    generator = patched_server.BatchGenerator(model, stream=mx.default_stream(mx.cpu))
    serving = Serving(generator, plugin, model)
    client = serving.ask(1000, 20, 9)
    while not client.answer:
        serving.step()
    if place == "end":

        def extract_cache(batch: Any, place: int) -> Any:
            raise RuntimeError("bad luck")

        monkeypatch.setattr(stock.GenerationBatch, "extract_cache", extract_cache)
    while not client.context._should_stop:
        serving.step()
    monkeypatch.undo()
    assert "bad luck" in str(client.error)
    assert all(tokens == client.ids[: len(tokens)] == keys for *_, tokens, keys in plugin.saved)
    serving.run(again := serving.ask(500, 20))
    assert again.answer == right_answer(again)
    generator.close()


@pytest.mark.parametrize("answer", [None, "many", RuntimeError("bug")])
def test_a_plugin_that_cannot_tell_its_room_gets_no_drafts(
    answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def room(caches: Sequence[Any]) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    model = ProbeModel()
    support = ModelSupport(list, most_taken_back=room)
    assert PluginCaches(model, "fails", support).most_taken_back([KVCache()]) == 0
    assert "plugin fails failed in hook model_loaded" in caplog.text


class Stored(TakenRequest):
    """A request whose plugin has stored some ids, and fails now and then."""

    def __init__(self, ids: list[int], rng: random.Random) -> None:
        self._ids, self._rng = ids, rng
        self.n_asked = 0

    def draft_ids(self, run: Sequence[int], n: int) -> Any:
        self.n_asked += 1
        if self._rng.random() < 0.1:
            return self._rng.choice(([-1], None, "ids", [True], [1.5], [WORDS], [1 << 70]))
        if self._rng.random() < 0.1:
            raise RuntimeError("no guess today")
        ends = [end for end in range(3, len(self._ids)) if self._ids[end - 3 : end] == run[-3:]]
        return self._ids[ends[-1] :] if ends else ()  # more than was requested


@pytest.mark.parametrize("seed", range(6))
def test_what_the_conversation_does_not_have_is_guessed_by_the_plugin(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_lookup, "MOST_CREDIT", 1e9)
    rng = random.Random(seed)
    said = [rng.randrange(WORDS) for _ in range(400)]
    stored = [id_ if rng.random() < 0.95 else rng.randrange(WORDS) for id_ in said]
    script = [*(rng.randrange(WORDS) for _ in range(30)), *said]
    plain, guessing = Scripted(script), Scripted(script)
    expected = all_of(begun(plain, 30, 350, True, None), lambda one: one.next())
    batch, request = begun(guessing, 30, 350, True, None), Stored(stored, rng)
    batch.tokens = [TakenTokens(batch.tokens[0], Taken("stored", request))]
    made = PromptLookup(most_taken_back)
    made._gain = 1e9
    guessing.n_read.clear()
    told = all_of(batch, lambda one: made.next(one)[0])
    assert [one.token for one in told] == [one.token for one in expected]
    assert told[-1].all_tokens == expected[-1].all_tokens
    assert request.n_asked > 50 and len(guessing.n_read) < 200
    assert max(guessing.n_read) <= prompt_lookup.MOST_DRAFTED + 1


def test_a_plugin_is_not_asked_for_what_the_conversation_has() -> None:
    script = [*range(1, 31), *range(1, 31), *range(1, 31)]
    model, request = Scripted(script), Stored([], random.Random(0))
    batch, made = begun(model, 36, 50, False, None), PromptLookup(most_taken_back)
    batch.tokens = [TakenTokens(batch.tokens[0], Taken("stored", request))]
    all_of(batch, lambda one: made.next(one)[0])
    assert request.n_asked <= 1  # with the last id of the first pass
