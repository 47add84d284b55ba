"""Draft tokens change no reply, and caches have only the tokens of the reply."""

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
N_IDS = 40
"""The size of the vocabulary."""


class Scripted:
    """A model that answers with the next id of a script; its keys are the ids that it has read."""

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
        return mx.where(mx.arange(N_IDS) == follow[:, None], 9.0, 0.0)[None]


def repeating(seed: int, n: int) -> list[int]:
    """Return ids that often repeat earlier ids, exactly or nearly."""
    rng, ids = random.Random(seed), [1, 2, 3, 4, 5]
    while len(ids) < n:
        at, length = rng.randrange(len(ids) - 4), rng.choice((1, 5, 12, 40))
        ids += ids[at : at + length]
        ids.append(rng.randrange(N_IDS - 1))
    return ids[:n]


def begin_reply(
    model: Scripted, n_prompt: int, n_reply: int, quantized: bool, stop: int | None
) -> Any:
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
        ends = {"normal": [(sequence, None) for sequence in sequences]} if sequences else {}
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


def all_responses(batch: Any, step: Any) -> list[Any]:
    responses: list[Any] = []
    while len(batch):
        responses += step(batch)
    return responses


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_reply_with_drafts_equals_the_reply_without_drafts(
    seed: int, quantized: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_lookup, "MOST_CREDIT", 1e9)  # also after wrong drafts
    rng = random.Random(seed)
    script = repeating(seed, 900)
    n_prompt, n_reply = rng.randrange(8, 400), rng.randrange(1, 400)
    stop = rng.choice((None, script[n_prompt + n_reply // 2]))
    plain, drafting = Scripted(script), Scripted(script)
    expected = all_responses(
        begin_reply(plain, n_prompt, n_reply, quantized, stop), lambda batch: batch.next()
    )
    lookup = PromptLookup(most_taken_back)
    lookup._gain = 1e9
    batch = begin_reply(drafting, n_prompt, n_reply, quantized, stop)
    drafted = all_responses(batch, lambda batch: lookup.next(batch)[0])

    def fields(response: Any) -> tuple[Any, ...]:
        return response.uid, response.token, response.finish_reason, response.all_tokens

    assert list(map(fields, drafted)) == list(map(fields, expected))
    for response, other in zip(drafted, expected, strict=True):
        assert mx.array_equal(response.logprobs, other.logprobs)
    end, other = drafted[-1].prompt_cache[0], expected[-1].prompt_cache[0]
    assert end.size() == len(drafted[-1].all_tokens) == other.size()
    assert (
        all(map(mx.array_equal, end.keys_and_values(), other.keys_and_values()))
        if (quantized)
        else mx.array_equal(end.keys[:, :, : end.offset], other.keys[:, :, : end.offset])
    )


def test_repeated_text_takes_fewer_calls_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(perf_counter=count().__next__)  # no step is slow
    monkeypatch.setattr(prompt_lookup, "time", clock)
    script = [*range(1, 31), *range(1, 31), *range(1, 31)]
    model, lookup = Scripted(script), PromptLookup(most_taken_back)
    batch = begin_reply(model, 36, 50, False, None)
    model.n_read.clear()
    all_responses(batch, lambda batch: lookup.next(batch)[0])
    assert len(model.n_read) < 15 and max(model.n_read) > 8


def test_wrong_drafts_are_rare_and_cost_little_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes one second, a step with drafts takes three, and all drafts are wrong."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(prompt_lookup, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    lookup, n_drafted = PromptLookup(most_taken_back), 0
    batch = begin_reply(Scripted([1, 2, 3, 4, 5] * 400), 20, 900, False, None)
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
        n_drafted += lookup.next(batch)[1]
    assert 3 <= n_drafted <= 6
    assert clock.now <= 900 * 1.03


@pytest.mark.parametrize("change", ["nothing", "a processor", "another reply", "no room"])
def test_only_a_single_reply_without_processors_gets_drafts(change: str) -> None:
    """Also, a draft has only as many tokens as the caches can trim, and delays no first token."""
    script = [1, 2, 3, 4, 5] * 40
    batch = begin_reply(Scripted(script), 20, 30, False, None)
    lookup = PromptLookup(lambda caches: 1 if change == "no room" else most_taken_back(caches))
    lookup._step_s = 1e9
    first, is_drafted = lookup.next(batch)
    assert len(first) == 1 and not is_drafted
    if change == "a processor":
        batch.logits_processors = [[lambda ids, logits: logits]]
    if change == "another reply":
        batch.extend(begin_reply(Scripted(script), 20, 30, False, None))
    assert lookup.next(batch)[1] == (change == "nothing")


@pytest.mark.parametrize("choice", [PrecisionChoice(16, 16), PrecisionChoice()])
@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
def test_drafts_do_not_change_the_reply_of_a_real_model(
    family: str, choice: PrecisionChoice
) -> None:
    """The reply crosses ends of blocks, where drafts are shorter."""
    model = build(family)
    end_on_grid(model)
    with server_attention():
        spec = probe_model(model, choice)
        rng = random.Random(3)
        prompt = [rng.randrange(1, 60) for _ in range(200)]
        plain = all_responses(
            batch_of_one(model, prompt, spec.make_cache(), 400), lambda batch: batch.next()
        )
        # The drafts are the reply with wrong ids.
        right_ids = [response.token for response in plain]
        faulty = [id_ if rng.random() < 0.9 else (id_ + 1) % 60 for id_ in right_ids]
        lookup = PromptLookup(most_taken_back)
        lookup._gain, lookup._step_s = 1e9, 1e9
        runs = prompt_lookup.Occurrences(7, [*prompt[:-1]])
        runs.after = lambda run, n: faulty[len(runs.ids) - 199 :][:n]  # type: ignore[method-assign]
        batch = batch_of_one(model, prompt, spec.make_cache(), 400)
        runs.ids = batch.tokens[0]
        lookup._occurrences = runs
        drafted = all_responses(batch, lambda batch: lookup.next(batch)[0])
    assert [response.token for response in drafted] == right_ids


def test_sampler_gets_one_token_at_a_time() -> None:
    """XTC draws one random number per call; in older versions the number is used for all rows."""
    script, shapes = [1, 2, 3, 4, 5] * 40, set()
    batch, lookup = (
        begin_reply(Scripted(script), 20, 30, False, None),
        PromptLookup(most_taken_back),
    )

    def sample(logprobs: mx.array) -> mx.array:
        shapes.add(logprobs.shape)
        return mx.argmax(logprobs, axis=-1)

    batch.samplers = [sample]
    responses = all_responses(batch, lambda batch: lookup.next(batch)[0])
    assert shapes == {(1, N_IDS)} and [response.token for response in responses] == script[20:50]


class DraftingRequest(Saving):
    """A request whose plugin drafts the next ids, and then a wrong id."""

    def draft_ids(self, run: Sequence[int], n: int) -> list[int]:
        return [*range(run[-1] + 1, run[-1] + n), 7]


@pytest.mark.parametrize("place", ["model", "end"])
def test_error_in_a_draft_ends_the_reply_and_saves_no_drafts(
    place: str, patched_server: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is in the model, after its caches got the draft, or at an end in the draft."""

    class Failing(Counting):
        def __call__(self, ids: mx.array, cache: list[Any]) -> mx.array:
            logits = super().__call__(ids, cache)
            if place == "model" and 1 < ids.shape[1] < 18 and int(ids[0, 0]) >= 1020:
                raise RuntimeError("bad luck")
            return logits

    monkeypatch.setattr("tests.host.scheduling.test_prefill.Saving", DraftingRequest)
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
def test_invalid_or_failing_most_taken_back_counts_as_zero(
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


class StoredIds(TakenRequest):
    """A request whose plugin drafts from stored ids, and sometimes fails."""

    def __init__(self, ids: list[int], rng: random.Random) -> None:
        self._ids, self._rng = ids, rng
        self.n_asked = 0

    def draft_ids(self, run: Sequence[int], n: int) -> Any:
        self.n_asked += 1
        if self._rng.random() < 0.1:
            return self._rng.choice(([-1], None, "ids", [True], [1.5], [N_IDS], [1 << 70]))
        if self._rng.random() < 0.1:
            raise RuntimeError("no drafts")
        ends = [end for end in range(3, len(self._ids)) if self._ids[end - 3 : end] == run[-3:]]
        return self._ids[ends[-1] :] if ends else ()  # more than was requested


@pytest.mark.parametrize("seed", range(6))
def test_plugin_drafts_runs_that_are_new_to_the_conversation(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_lookup, "MOST_CREDIT", 1e9)
    rng = random.Random(seed)
    right_ids = [rng.randrange(N_IDS) for _ in range(400)]
    stored = [id_ if rng.random() < 0.95 else rng.randrange(N_IDS) for id_ in right_ids]
    script = [*(rng.randrange(N_IDS) for _ in range(30)), *right_ids]
    plain, drafting = Scripted(script), Scripted(script)
    expected = all_responses(begin_reply(plain, 30, 350, True, None), lambda batch: batch.next())
    batch, request = begin_reply(drafting, 30, 350, True, None), StoredIds(stored, rng)
    batch.tokens = [TakenTokens(batch.tokens[0], Taken("stored", request))]
    lookup = PromptLookup(most_taken_back)
    lookup._gain = 1e9
    drafting.n_read.clear()
    drafted = all_responses(batch, lambda batch: lookup.next(batch)[0])
    assert [response.token for response in drafted] == [response.token for response in expected]
    assert drafted[-1].all_tokens == expected[-1].all_tokens
    assert request.n_asked > 50 and len(drafting.n_read) < 200
    assert max(drafting.n_read) <= prompt_lookup.MOST_DRAFTED + 1


def test_plugin_is_not_asked_for_runs_in_the_conversation(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(perf_counter=count().__next__)  # no step is slow
    monkeypatch.setattr(prompt_lookup, "time", clock)
    script = [*range(1, 31), *range(1, 31), *range(1, 31)]
    model, request = Scripted(script), StoredIds([], random.Random(0))
    batch, lookup = begin_reply(model, 36, 50, False, None), PromptLookup(most_taken_back)
    batch.tokens = [TakenTokens(batch.tokens[0], Taken("stored", request))]
    model.n_read.clear()
    all_responses(batch, lambda batch: lookup.next(batch)[0])
    assert request.n_asked == 0 and max(model.n_read) > 8
