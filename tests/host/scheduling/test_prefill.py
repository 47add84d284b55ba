"""Prompts, also during replies: their order, their chunks, and errors that end only one prompt."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from queue import Queue
from types import ModuleType, SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import KVCache

from mlx_lm_kvpersist.cache.geometry.precision import PrecisionChoice
from mlx_lm_kvpersist.cache.geometry.spec import probe_model, spec_with
from mlx_lm_kvpersist.cache.live.attention import forced_plan
from mlx_lm_kvpersist.cache.live.caches import batch_of
from mlx_lm_kvpersist.cache.live.rows import rows_of
from mlx_lm_kvpersist.cli.quality_checks import server_attention
from mlx_lm_kvpersist.errors import ClientGone, DeviceFailed
from mlx_lm_kvpersist.host.hooks import (
    ClientRequest,
    ModelSupport,
    PrefillLimits,
    Prompt,
    TakenRequest,
)
from mlx_lm_kvpersist.host.manager import Taken, TakenTokens
from mlx_lm_kvpersist.host.scheduling import batch_generator, prefill
from mlx_lm_kvpersist.host.scheduling.model_provider import MOST_IN_A_ROW, PluginCaches
from mlx_lm_kvpersist.host.scheduling.waiting import ReplyQueue
from mlx_lm_kvpersist.ranks import Ranks
from mlx_lm_kvpersist.round_trip import tiny_model
from tests.support.host import plugged

VOCABULARY = 1 << 14
POISON = VOCABULARY - 1


class Counting:
    """A model that answers every token with the next id; its keys are the ids that it has read."""

    layers = (None,)
    make_cache: Any

    def __init__(self) -> None:
        self.computed: list[list[int]] = []
        self.most_positions = 0
        """The highest number of positions of a prompt in a call, padding included."""
        self.failing_step = False

    def __call__(self, ids: mx.array, cache: list[Any]) -> mx.array:
        read: Any = ids.tolist()
        if any(POISON in row for row in read) or (self.failing_step and len(read) > 1):
            raise RuntimeError("bad luck")
        self.computed.append([len(row) for row in read])
        if len(read[0]) > 1:
            self.most_positions = max(
                self.most_positions, int(mx.max(mx.array(cache[0].offset))) + len(read[0])
            )
        keys = mx.broadcast_to(ids[:, None, :, None], (*ids.shape[:1], 1, ids.shape[1], 8))
        cache[0].update_and_fetch(keys.astype(mx.float32), keys.astype(mx.float32))
        follow = (ids[..., None] + 1) % VOCABULARY
        return mx.where(mx.arange(VOCABULARY) == follow, 1.0, 0.0)


class Plugin:
    """A plugin that records the saves of its requests."""

    def __init__(self, limits: PrefillLimits, *, joins: bool = False) -> None:
        self.limits, self.joins = limits, joins
        self.saved: list[tuple[Any, str, list[int], list[int]]] = []

    def limit(self, model: Counting) -> None:
        """Give the model caches with the plugin's limits."""
        support = ModelSupport(list, limits=self.limits)
        if self.joins:
            support = replace(support, merge=batch_of, together=rows_of)
        model.make_cache = PluginCaches(model, "saves", support)


class Saving(TakenRequest):
    """A request whose saves are recorded with the first id of its prompt."""

    def __init__(self, plugin: Plugin, prompt: Prompt) -> None:
        super().__init__(prompt)
        self.plugin = plugin

    def insert(self, tokens: Sequence[int], caches: list[Any], cache_type: str) -> None:
        saved = self.prompt.ids[0], cache_type, list(tokens), keys_of(caches)
        self.plugin.saved.append(saved)


def keys_of(caches: list[Any]) -> list[int]:
    keys: list[int] = caches[0].state[0][0, 0, :, 0].astype(mx.int32).tolist()
    return keys


class Client:
    """A client's prompt and reply, with a simulated context of stock."""

    def __init__(self, plugin: Any, first: int, n_prompt: int) -> None:
        self.ids = list(range(first, first + n_prompt))
        sent = SimpleNamespace(request_type="text", prompt="", messages=[])
        self.request = ClientRequest(sent)
        self.queue: Queue[Any] = Queue()
        self.reply = ReplyQueue(self.queue, self.request)
        self.context = SimpleNamespace(stopped=False, _should_stop=False)
        self.context.stop = lambda: setattr(self.context, "_should_stop", True)
        self.reply.put(self.context)
        prompt = Prompt(self.ids, [self.ids], ["user"])
        taken = Taken("saves", Saving(plugin, prompt))
        taken.reply = self.reply
        self.tokens = TakenTokens(self.ids, taken)
        self.answer: list[int] = []
        self.uid = -1

    @property
    def error(self) -> Any:
        items = [self.queue.get() for _ in range(self.queue.qsize())]
        return next((item for item in items if isinstance(item, Exception)), None)


class Serving:
    """The server's batch generator, driven as the server's loop does."""

    def __init__(self, generator: Any, plugin: Plugin, model: Counting) -> None:
        self.generator, self.plugin, self.model = generator, plugin, model
        self.clients: dict[int, Client] = {}
        self.order: list[int] = []
        """The prompt that each step continued, by its first id."""
        self.progress: list[tuple[int, int]] = []
        self.segment_ends: list[tuple[list[int], list[int]]] = []
        """The tokens and the keys of each prompt at a segment's end, where stock saves."""

    def ask(
        self, first: int, n_prompt: int, max_tokens: int = 4, *, is_taken: bool = True
    ) -> Client:
        client = Client(self.plugin, first, n_prompt)
        (client.uid,) = self.generator.insert_segments(
            segments=[[client.ids[: n_prompt // 2], client.ids[n_prompt // 2 :]]],
            max_tokens=[max_tokens],
            caches=[[KVCache()]],
            all_tokens=[client.tokens[:0] if is_taken else []],
        )
        self.clients[client.uid] = client
        return client

    def step(self) -> None:
        prompts, replies = self.generator.next()
        ended = [chunk.uid for chunk in prompts if chunk.end_of_segment and not chunk.end_of_prompt]
        for caches, tokens in self.generator.extract_cache(ended).values():
            self.segment_ends.append((list(tokens), keys_of(caches)))
        gone = []
        for response in prompts:
            client = self.clients[response.uid]
            self.order.append(client.ids[0])
            self.progress.append(response.progress)
            client.reply.put(response.progress)
            if client.context._should_stop:
                gone.append(response.uid)
        for response in replies:
            client = self.clients[response.uid]
            client.reply.put(response)
            client.answer.append(response.token)
            if client.context._should_stop:
                gone.append(response.uid)
        self.generator.remove(gone)

    def run(self, *clients: Client, max_steps: int = 500) -> None:
        for _ in range(max_steps):
            self.step()
            if all(len(client.answer) == 4 for client in clients):
                return
        raise AssertionError([len(client.answer) for client in clients])


def right_answer(client: Client) -> list[int]:
    return [client.ids[-1] + n for n in range(1, 5)]


@pytest.fixture
def serve(patched_server: ModuleType) -> Iterator[Callable[..., Serving]]:
    made = []

    def start(
        max_chunk: int = 64, max_stall_s: float = 1.0, *, joins: bool = False, **limits: Any
    ) -> Serving:
        plugin = Plugin(
            PrefillLimits(
                max_stall_s, lambda position: max_chunk if position else max_chunk or 1, **limits
            ),
            joins=joins,
        )
        plugin.limit(model := Counting())
        stream = mx.default_stream(mx.default_device())
        generator = patched_server.BatchGenerator(model, stream=stream)
        made.append(generator)
        return Serving(generator, plugin, model)

    yield start
    for generator in reversed(made):
        generator.close()


def test_every_prompt_is_computed_alone_in_chunks(serve: Callable[..., Serving]) -> None:
    serving = serve(max_chunk=70)
    clients = [serving.ask(1000 * i, n) for i, n in enumerate((400, 31, 200), 1)]
    serving.run(*clients)
    assert [client.answer for client in clients] == [right_answer(c) for c in clients]
    prompts = [rows for rows in serving.model.computed if rows != [1] * len(rows)]
    assert max(len(rows) for rows in prompts) == 1 and max(prompts) == [64]


class TwoRanks(Ranks):
    """Rank 0 of two ranks; the other rank sends the same values."""

    def __init__(self) -> None:
        super().__init__(2, 0)
        self.topics: list[str] = []

    def _exchange(self, value: int, payload: bytes, what: str) -> list[tuple[int, int, bytes]]:
        self.topics.append(what)
        return [(value, len(payload), payload[:104])] * 2


def test_step_of_several_ranks_has_at_most_one_message(
    serve: Callable[..., Serving],
) -> None:
    serving, ranks = serve(max_chunk=256, joins=True), TwoRanks()
    serving.generator._ranks = serving.model.make_cache.ranks = ranks
    clients = [serving.ask(1000 * i, n) for i, n in enumerate((100, 90, 80), 1)]
    n_messages = []
    while any(len(client.answer) < 4 for client in clients):
        n_before = len(ranks.topics)
        serving.step()
        n_messages.append(len(ranks.topics) - n_before)
    assert [client.answer for client in clients] == [right_answer(c) for c in clients]
    assert max(map(len, serving.model.computed)) == 3 and serving.model.most_positions > 1
    assert set(n_messages) == {0, 1} and set(ranks.topics) == {"a step"}


def test_segments_that_fit_a_chunk_are_computed_together(serve: Callable[..., Serving]) -> None:
    serving = serve(max_chunk=256, joins=True)
    clients = [serving.ask(1000 * i, n) for i, n in enumerate((60, 44, 900, 70, 3, 52), 1)]
    serving.run(*clients)
    assert [client.answer for client in clients] == [right_answer(c) for c in clients]
    prompts = [rows for rows in serving.model.computed if rows != [1] * len(rows)]
    assert max(len(rows) for rows in prompts) >= 4
    assert max(sum(rows) for rows in prompts) <= 256
    assert all(tokens == keys[: len(tokens)] for tokens, keys in serving.segment_ends)
    assert prompts[0] == [35] * 5, "the first segments of all short prompts, padded"


@pytest.mark.parametrize("joins", [False, True])
def test_short_segments_are_padded_if_prompts_may_join(
    serve: Callable[..., Serving], *, joins: bool
) -> None:
    serving = serve(max_chunk=256, joins=joins, least_width=33)
    client = serving.ask(1000, 20)
    serving.run(client)
    assert client.answer == right_answer(client)
    prompts = [rows for rows in serving.model.computed if rows != [1]]
    assert prompts == ([[33], [33]] if joins else [[10], [9]])
    assert all(tokens == keys[: len(tokens)] for tokens, keys in serving.segment_ends)


@pytest.mark.parametrize("n_positions", [42, 43, 52])
def test_padding_does_not_exceed_the_positions_of_the_model(
    serve: Callable[..., Serving], *, n_positions: int
) -> None:
    serving = serve(max_chunk=256, joins=True, least_width=33, n_positions=n_positions)
    client = serving.ask(1000, 20)
    serving.run(client)
    assert client.answer == right_answer(client)
    prompts = [rows for rows in serving.model.computed if rows != [1]]
    assert prompts == [[33], [33] if n_positions >= 43 else [9]]


def test_prompt_near_the_last_position_does_not_join_a_longer_segment(
    serve: Callable[..., Serving],
) -> None:
    serving = serve(max_chunk=160, joins=True, n_positions=300)
    far = serving.ask(1000, 300)
    for _ in range(3):
        serving.step()
    near = serving.ask(2000, 120)
    serving.run(far, near)
    assert [client.answer for client in (far, near)] == [right_answer(c) for c in (far, near)]
    assert serving.model.most_positions <= 300


@pytest.mark.parametrize("full_precision", [0, 1])
def test_joined_prompts_with_mixed_precision_layers_match_single_prompts(
    full_precision: int,
) -> None:
    """The model makes one mask for all layers, but layers of other precision need another mask."""
    model = tiny_model(n_layers=3)
    spec = probe_model(model, PrecisionChoice())
    (group,) = spec.groups
    groups = [replace(group, slots=(0, 2)), replace(group, name="1", slots=(1,))]
    groups[full_precision] = replace(groups[full_precision], precision=None)
    spec = spec_with(model, groups)
    for cache in spec.template:
        cache.plan = forced_plan("dequantize")
    support = ModelSupport(
        spec.make_cache, batch_of, rows_of, limits=PrefillLimits(1.0, lambda position: 512)
    )
    model.make_cache = PluginCaches(model, "mixed", support)
    prompts = [[i * (7 + row) % 61 + 2 for i in range(n)] for row, n in enumerate((24, 30, 61))]
    begun, caches = (0, 21, 50), [model.make_cache() for _ in prompts]
    logprobs: dict[int, mx.array] = {}
    with server_attention():
        for prompt, cache, n in list(zip(prompts, caches, begun, strict=True))[1:]:
            model(mx.array([prompt[:n]]), cache=cache)
        stream = mx.default_stream(mx.default_device())
        generator = batch_generator.plugin_batch_generator(BatchGenerator)(model, stream=stream)
        rest = [prompt[n:] for prompt, n in zip(prompts, begun, strict=True)]
        uids = generator.insert(rest, [1] * 3, caches)
        while len(logprobs) < 3:
            logprobs |= {response.uid: response.logprobs for response in generator.next()[1]}
        generator.close()
        for uid, prompt in zip(uids, prompts, strict=True):
            logits = model(mx.array([prompt]), cache=spec.make_cache())[0, -1]
            assert mx.allclose(logprobs[uid], logits - mx.logsumexp(logits), atol=0.02)


def test_ready_prompts_begin_their_replies_in_one_step(serve: Callable[..., Serving]) -> None:
    serving = serve(max_chunk=256, joins=True)
    clients = [serving.ask(1000 * i, 40) for i in range(1, 6)]
    serving.run(*clients)
    steps = [rows for rows in serving.model.computed if rows == [1] * len(rows)]
    assert steps[0] == [1] * 5 and len(steps) <= 5


def test_while_no_reply_runs_ready_prompts_wait_for_short_prompts(
    serve: Callable[..., Serving],
) -> None:
    serving = serve(max_chunk=256, joins=True)
    clients = [serving.ask(1000, 40)]
    for _ in range(2):
        serving.step()
    clients += [serving.ask(1000 * i, 2) for i in (2, 3)]
    serving.run(*clients)
    assert serving.model.computed[:4] == [[20], [19], [1] * 2, [1] * 3]
    assert [client.answer for client in clients] == [right_answer(c) for c in clients]


@pytest.mark.parametrize(
    ("max_chunk", "chunks"), [(0, [1] * 39), (1, [1] * 39), (10, [10, 10, 10, 9]), (25, [20, 19])]
)
def test_chunks_obey_the_plugins_limit_but_have_at_least_one_token(
    serve: Callable[..., Serving], max_chunk: int, chunks: list[int]
) -> None:
    serving = serve(max_chunk=max_chunk)
    serving.run(client := serving.ask(1000, 40))
    assert client.answer == right_answer(client)
    assert [rows[0] for rows in serving.model.computed[: len(chunks)]] == chunks


def test_a_chunk_is_computed_before_its_step_ends(serve: Callable[..., Serving]) -> None:
    """Otherwise the replies' next step would wait for the chunk, however long it is."""
    serving = serve(max_chunk=64)
    serving.ask(1000, 128)  # the first segment is one chunk, which is not saved here
    serving.step()
    gc.collect()
    before = mx.get_active_memory()
    batches = [prefill.batch for prefill in serving.generator.prefills.all]
    mx.eval([cache.state for batch in batches for cache in batch.prompt_cache])
    assert serving.generator.prompt_cache_nbytes > 0
    assert mx.get_active_memory() - before < serving.generator.prompt_cache_nbytes / 2


@pytest.mark.parametrize("unused_bytes", [1 << 10, 1 << 40])
def test_freed_memory_above_the_plugins_limit_is_given_back(
    serve: Callable[..., Serving], monkeypatch: pytest.MonkeyPatch, unused_bytes: int
) -> None:
    serving = serve(max_chunk=64)
    serving.ask(1000, 600)
    cleared: list[None] = []
    monkeypatch.setattr(mx, "get_cache_memory", lambda: unused_bytes)
    monkeypatch.setattr(mx, "clear_cache", lambda: cleared.append(None))
    for _ in range(3):
        serving.step()
    assert len(cleared) == (3 if unused_bytes > serving.plugin.limits.max_unused_bytes else 0)


def test_shortest_prompt_goes_first_and_a_long_prompt_is_not_starved(
    serve: Callable[..., Serving],
) -> None:
    serving = serve(max_chunk=64)
    long = serving.ask(1000, 2000)
    serving.step()
    short = serving.ask(5000, 60)
    while not short.answer:
        serving.step()
    assert serving.order.count(1000) <= 3  # a chunk before the short prompt, the others later
    n_short, begun = 0, len(serving.order)
    while not long.answer:
        n_short += 1
        serving.ask(6000 + 40 * n_short, 30, max_tokens=1)
        serving.step()
        assert len(serving.order) < 2000
    turns = serving.order[begun:]
    others = [turn for turn in turns if turn != 1000]
    n_chunks = len(turns) - len(others)
    n_at_once = serving.generator.prefill_batch_size
    assert n_chunks >= 2000 // 64 - 1 and n_short <= n_at_once * (n_chunks + 2)
    assert long.answer[0] == 3000


def test_prompt_with_the_fewest_tokens_left_goes_first(
    serve: Callable[..., Serving],
) -> None:
    serving = serve(max_chunk=64)
    serving.ask(1000, 800)
    for _ in range(10):
        serving.step()
    serving.ask(5000, 300)
    serving.step()
    assert serving.order == [1000] * 11


def test_each_chunk_is_saved_except_at_the_end_of_a_segment(serve: Callable[..., Serving]) -> None:
    serving = serve(max_chunk=64)
    client = serving.ask(1000, 300)
    serving.run(client)
    saved = [(kind, len(tokens)) for _, kind, tokens, _ in serving.plugin.saved]
    # The server saves at a segment's end; the last chunk of a segment is not saved twice.
    assert saved == [("prefill", 64), ("prefill", 128), ("prefill", 192), ("prefill", 256)]
    for first, _, tokens, keys in serving.plugin.saved:
        assert first == 1000 and tokens == keys == client.ids[: len(tokens)]


def test_responses_have_the_progress_and_segment_ends_of_a_prompt(
    serve: Callable[..., Serving],
) -> None:
    serving = serve(max_chunk=64)
    serving.run(client := serving.ask(1000, 300))
    assert serving.progress == [(n, 300) for n in (64, 128, 150, 192, 256, 299, 300)]
    assert serving.segment_ends == [(client.ids[:n],) * 2 for n in (150, 299)]


def test_prompt_whose_first_segment_has_one_token_is_answered(
    serve: Callable[..., Serving],
) -> None:
    serving = serve(max_chunk=64)
    serving.run(client := serving.ask(1000, 3))
    assert client.answer == right_answer(client)


def test_without_a_plugin_stock_computes_prompts_in_one_batch(patched_server: ModuleType) -> None:
    model = Counting()
    stream = mx.default_stream(mx.default_device())
    with plugged():
        generator = patched_server.BatchGenerator(model, stream=stream)
        serving = Serving(generator, Plugin(PrefillLimits(1.0, lambda position: 64)), model)
        serving.run(*(clients := [serving.ask(1000 * n, 40) for n in (1, 2)]))
        generator.close()
    assert [client.answer for client in clients] == [right_answer(c) for c in clients]
    assert any(len(rows) == 2 and rows[0] > 1 for rows in model.computed)


@pytest.mark.parametrize("n_prompts", [1, 8])
def test_concurrent_prompts_and_replies_obey_the_servers_limits(
    serve: Callable[..., Serving], n_prompts: int
) -> None:
    serving = serve(max_chunk=64)
    serving.generator.completion_batch_size = 2
    serving.generator.prefill_batch_size = n_prompts
    clients = [serving.ask(1000 * n, 50, max_tokens=12) for n in range(1, 6)]
    while not all(len(client.answer) == 12 for client in clients):
        serving.step()
        assert len(serving.generator.prefills.all) <= n_prompts
    assert max(map(len, serving.model.computed)) == 2


def test_untaken_requests_are_computed_and_their_errors_are_raised(
    serve: Callable[..., Serving],
) -> None:
    serving = serve(max_chunk=64)
    serving.generator.prefill_batch_size = 1
    clients = [serving.ask(1000 * n, 100, is_taken=False) for n in (1, 2)]
    serving.run(*clients)
    assert [client.answer for client in clients] == [right_answer(c) for c in clients]
    bad = serving.ask(POISON - 50, 51, is_taken=False)
    with pytest.raises(RuntimeError, match="bad luck"):
        serving.run(bad)


def test_client_that_left_is_dropped_while_queued_computed_or_replying(
    serve: Callable[..., Serving],
) -> None:
    serving = serve(max_chunk=64)
    serving.generator.prefill_batch_size = 2
    decoding, stays = serving.ask(1000, 20, 4000), serving.ask(2000, 500)
    while not decoding.answer:
        serving.step()
    prefilling, waiting = serving.ask(3000, 600), serving.ask(4000, 700)
    serving.step()
    assert prefilling.uid in [prompt.uid for prompt in serving.generator.prefills.all]
    assert waiting.uid in [prompt.uid for prompt in serving.generator.queue]
    for client in (decoding, prefilling, waiting):
        client.request.client_gone = True
    serving.order.clear()
    serving.step()
    gone = decoding, prefilling, waiting
    # The prompts got one more response, after which stock removes a stopped request.
    assert {3000, 4000} <= set(serving.order)
    assert all(isinstance(client.error, ClientGone) for client in gone)
    assert not serving.generator.extract_cache([client.uid for client in gone])
    n_computed = len(serving.model.computed)
    serving.run(stays)
    assert stays.answer == right_answer(stays) and len(serving.model.computed) - n_computed < 20


def test_remove_returns_caches_and_tokens_if_requested(serve: Callable[..., Serving]) -> None:
    serving = serve(max_chunk=64)
    decoding = serving.ask(1000, 20, 100)
    while not decoding.answer:
        serving.step()
    computed = serving.ask(2000, 300)
    serving.step()
    uids = [decoding.uid, computed.uid]
    removed = serving.generator.remove(uids, return_prompt_caches=True)
    for client in (decoding, computed):
        caches, tokens = removed[client.uid]
        assert keys_of(caches)[: len(tokens)] == tokens
        assert tokens[:20] == client.ids[:20]
    assert not serving.generator.extract_cache(uids) and not serving.generator.prefills.all
    other = serving.ask(3000, 300)
    serving.step()
    assert serving.generator.remove([other.uid]) == {}


def test_requests_of_clients_that_left_are_neither_computed_nor_logged(
    serve: Callable[..., Serving], caplog: pytest.LogCaptureFixture
) -> None:
    serving = serve(max_chunk=64)
    serving.generator.prefill_batch_size = 1
    clients = [serving.ask(1000 * n, 300) for n in (1, 2)]
    serving.step()
    for client in clients:
        client.request.client_gone = True
    serving.model.computed.clear()
    serving.step()
    assert not serving.model.computed and not caplog.records


def test_error_in_a_prompt_ends_only_its_request(
    serve: Callable[..., Serving], caplog: pytest.LogCaptureFixture
) -> None:
    serving = serve(max_chunk=64)
    good = serving.ask(1000, 200)
    bad = serving.ask(POISON - 150, 151)
    serving.run(good)
    assert good.answer == right_answer(good)
    assert "bad luck" in str(bad.error) and bad.context._should_stop and not bad.answer
    assert "bad luck" in caplog.text
    assert not serving.generator.extract_cache([bad.uid])
    serving.run(again := serving.ask(2000, 70))
    assert again.answer == right_answer(again)


@pytest.mark.parametrize("place", [10, 50])
@pytest.mark.parametrize("n_good", [1, 4])
def test_error_in_a_joint_call_ends_only_the_faulty_request(
    serve: Callable[..., Serving], n_good: int, place: int
) -> None:
    """The error is in the first half of the prompt, or at the beginning of its reply."""
    serving = serve(max_chunk=512, joins=True)
    bad = serving.ask(POISON - place, 51)
    good = [serving.ask(1000 * i, 30 + 9 * i) for i in range(1, n_good + 1)]
    serving.run(*good)
    assert [client.answer for client in good] == [right_answer(c) for c in good]
    assert not any(client.error for client in good)
    while not bad.context._should_stop:
        serving.step()
    assert "bad luck" in str(bad.error) and not bad.answer
    assert not serving.generator.extract_cache([bad.uid])
    more = [serving.ask(9000 + 100 * i, 40) for i in range(3)]
    serving.run(*more)
    prompts = [rows for rows in serving.model.computed if max(rows) > 1]
    assert len(prompts[-1]) == 3, "later prompts are computed together again"


@pytest.mark.parametrize("stage", ["prompt", "first token"])
def test_after_a_joint_memory_error_prompts_are_computed_alone(
    serve: Callable[..., Serving], monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    serving = serve(max_chunk=512, joins=True)
    computed, n_failed = Counting.__call__, 0

    def short_of_memory(model: Counting, ids: mx.array, cache: list[Any]) -> mx.array:
        nonlocal n_failed
        is_prompt = ids.shape[1] > 1
        if ids.shape[0] > 1 and is_prompt == (stage == "prompt") and not n_failed:
            if is_prompt:
                computed(model, ids, cache)  # the caches change before the error
            n_failed += 1
            raise MemoryError("no memory")
        return computed(model, ids, cache)

    monkeypatch.setattr(Counting, "__call__", short_of_memory)
    clients = [serving.ask(1000 * i, 20 + 7 * i) for i in range(1, 5)]
    uids = [client.uid for client in clients]
    while not all(len(client.answer) == 4 for client in clients):
        serving.step()
        left = [client.uid for client in clients if len(client.answer) < 4]
        assert set(left) <= set(serving.generator.extract_cache(uids))
    assert n_failed == 1
    assert [client.answer for client in clients] == [right_answer(c) for c in clients]
    assert all(client.error is None for client in clients)
    for first, _, tokens, keys in serving.plugin.saved:
        assert tokens == keys[: len(tokens)] == list(range(first, first + len(tokens)))
    assert not (serving.generator.parked or serving.generator.prefills.all)


def test_request_that_ends_before_its_second_try_is_dropped(
    serve: Callable[..., Serving],
) -> None:
    serving = serve(max_chunk=512, joins=True)
    bad, leaves, removed, stays = (
        serving.ask(first, 60) for first in (POISON - 9, 2000, 3000, 4000)
    )
    serving.step()
    assert {prompt.uid for prompt in serving.generator.parked} == set(serving.clients)
    leaves.request.client_gone = True
    serving.generator.remove([removed.uid])
    serving.run(stays)
    assert stays.answer == right_answer(stays) and isinstance(leaves.error, ClientGone)
    assert "bad luck" in str(bad.error) and not (removed.answer or removed.error)
    assert not serving.generator.parked and not serving.generator.prefills.all


def test_after_a_failed_step_new_requests_run_alone(serve: Callable[..., Serving]) -> None:
    """The server removes failed rows later; the next steps must not have them."""
    serving = serve(max_chunk=64)
    pair = [serving.ask(1000 * i, 20, 100) for i in (1, 2)]
    while not all(client.answer for client in pair):
        serving.step()
    joins = serving.ask(3000, 2)
    serving.step()
    serving.model.failing_step = True
    for _ in range(3):
        serving.generator.next()
    assert all("bad luck" in str(client.error) for client in pair)
    assert not joins.context._should_stop


def allocate_8_mib_in_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the model allocate memory like activations."""
    computed = Counting.__call__

    def wasteful(model: Counting, ids: mx.array, cache: list[Any]) -> mx.array:
        logits = computed(model, ids, cache)
        if hasattr(cache[0], "keys"):
            activations = mx.arange(2 << 20, dtype=mx.float32) + ids.sum()
            cache[0].keys = cache[0].keys + (activations.max() < 0)
        return logits

    monkeypatch.setattr(Counting, "__call__", wasteful)


def test_plugin_gets_the_memory_of_each_chunk(
    serve: Callable[..., Serving], monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate_8_mib_in_each_call(monkeypatch)
    chunks: list[tuple[int, int, int]] = []
    serving = serve(max_chunk=256, joins=True, took=lambda *chunk: chunks.append(chunk))
    serving.run(serving.ask(1000, 600))
    assert [chunk[:2] for chunk in chunks] == [(256, 0), (44, 256), (212, 300), (87, 512)]
    assert all(7 << 20 < n_bytes < 20 << 20 for *_, n_bytes in chunks)
    serving.run(serving.ask(2000, 50), serving.ask(3000, 40))
    assert chunks[4][:2] == (2 * 25, 0)


def test_error_in_the_plugins_chunk_limit_ends_only_its_request(
    serve: Callable[..., Serving],
) -> None:
    def most_tokens(position: int) -> int:
        if position >= 200:
            raise RuntimeError("bad luck")
        return 64

    serving = serve(max_chunk=64)
    serving.generator.prefills._limits = PrefillLimits(1.0, most_tokens)
    good, bad = serving.ask(1000, 200), serving.ask(2000, 400)
    serving.run(good)
    assert good.answer == right_answer(good)
    while not bad.context._should_stop:
        serving.step()
    assert "bad luck" in str(bad.error) and not bad.answer


def test_failed_step_of_replies_ends_all_replies_but_not_the_server(
    serve: Callable[..., Serving],
) -> None:
    serving = serve(max_chunk=64)
    pair = [serving.ask(1000 * i, 20, 100) for i in (1, 2)]
    while not all(client.answer for client in pair):
        serving.step()
    serving.model.failing_step = True
    serving.step()
    assert all("bad luck" in str(client.error) for client in pair)
    serving.model.failing_step = False
    serving.run(again := serving.ask(3000, 70))
    assert again.answer == right_answer(again)


@pytest.mark.parametrize(("step_s", "expected"), [(0.0, 512), (0.1, 256)])
def test_chunks_during_replies_take_at_most_the_maximum_stall(
    serve: Callable[..., Serving], monkeypatch: pytest.MonkeyPatch, step_s: float, expected: int
) -> None:
    """The clock advances by 0.35 ms for each token of a prompt, and by `step_s` for each step."""
    now_s = 0.0
    clock = SimpleNamespace(perf_counter=lambda: now_s)
    for module in (batch_generator, prefill):
        monkeypatch.setattr(module, "time", clock)
    serving = serve(max_chunk=4096, max_stall_s=0.2)
    computed = Counting.__call__

    def slow(model: Counting, ids: mx.array, cache: list[Any]) -> mx.array:
        nonlocal now_s
        now_s += 0.35e-3 * ids.shape[1] if ids.shape[1] > 1 else step_s
        return computed(model, ids, cache)

    monkeypatch.setattr(Counting, "__call__", slow)
    alone = serving.ask(1000, 9000, 500)
    serving.step()
    while not alone.answer:
        serving.step()
    longest = max(max(rows) for rows in serving.model.computed)
    assert longest == 2048  # the size of stock's chunks, which take 0.7 s
    serving.model.computed.clear()
    beside = serving.ask(11_000, 3000)
    while not beside.answer:
        serving.step()
    chunks = [rows[0] for rows in serving.model.computed if max(rows) > 1]
    assert max(chunks) <= expected and sum(chunks) == 2999
    assert sorted(chunks)[len(chunks) // 2] == expected


class Device:
    """Replaces `mx` in our modules, and the clock: queued work takes its time when code waits.

    is_limited: whether submitting a chunk waits for the steps in the queue and for most of the
    chunk, as MLX does if the queue is long. slowness: how many times longer chunks take.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, is_limited: bool = False) -> None:
        self.now_s = 0.0
        self.is_limited, self.slowness = is_limited, 1.0
        self.submitted: list[mx.array] = []
        """The tokens of steps."""
        self.queue: list[tuple[str, float]] = []
        self.built_s = 0.0
        """The time of a chunk that has been built and not submitted."""
        self.n_chunks = self.n_idle = 0
        """How many chunks were submitted; how many of them when the device had no work."""
        computed = Counting.__call__

        def timed(model: Counting, ids: mx.array, cache: list[Any]) -> mx.array:
            if ids.shape[1] > 1:
                self.built_s += self.slowness * (0.02 + 1e-3 * ids.shape[1])
            else:
                self.synchronize()  # mlx-lm waits for a step after it has submitted the next
                self.queue.append(("step", 0.08))
            return computed(model, ids, cache)

        monkeypatch.setattr(Counting, "__call__", timed)
        clock = SimpleNamespace(perf_counter=lambda: self.now_s)
        for module in (batch_generator, prefill):
            monkeypatch.setattr(module, "time", clock)
            monkeypatch.setattr(module, "mx", self)

    def __getattr__(self, name: str) -> Any:
        return getattr(mx, name)

    def async_eval(self, *arrays: Any) -> None:
        mx.async_eval(*arrays)  # type: ignore[no-untyped-call]
        if is_step(arrays):
            self.submitted.extend(arrays)
        elif self.built_s:
            self.n_chunks += 1
            self.n_idle += not self.queue
            if self.is_limited:
                self.synchronize()
                self.now_s += 0.95 * self.built_s
                self.built_s *= 0.05
            self.queue.append(("chunk", self.built_s))
            self.built_s = 0.0

    def synchronize(self) -> None:
        self.now_s += sum(seconds for _, seconds in self.queue)
        self.queue.clear()

    def eval(self, *arrays: Any) -> None:
        is_earlier = any(arrays[0] is tokens for tokens in self.submitted)
        self.async_eval(*arrays)
        mx.eval(*arrays)
        after: list[tuple[str, float]] = []
        if is_earlier:
            while self.queue and self.queue[-1][0] == "chunk":
                after.insert(0, self.queue.pop())
        self.synchronize()
        self.queue = after


@pytest.mark.parametrize("n_beside", [0, 3])
def test_steps_of_replies_do_not_change_the_learned_pace(
    serve: Callable[..., Serving], monkeypatch: pytest.MonkeyPatch, n_beside: int
) -> None:
    """MLX queues work on a device, so a chunk waits for the replies' step."""
    serving, _ = serve(max_chunk=4096, max_stall_s=0.4), Device(monkeypatch)
    beside_replies(serving, n_beside)
    pace = serving.plugin.limits.pace
    compute(serving, 4000, 9000)
    chunks = [rows[0] for rows in serving.model.computed if max(rows) > 1]
    assert (max(chunks) == 256) is (n_beside > 0)
    assert pace.seconds(0, 4000) == pytest.approx(4000e-3 + 4000 / 512 * 0.02, rel=0.02)


@pytest.mark.parametrize("n_beside", [0, 3])
def test_waiting_while_a_chunk_is_submitted_does_not_change_the_learned_pace(
    serve: Callable[..., Serving], monkeypatch: pytest.MonkeyPatch, n_beside: int
) -> None:
    serving = serve(max_chunk=4096, max_stall_s=0.3)
    device = Device(monkeypatch, is_limited=True)
    compute(serving, 4000, 9000)
    beside_replies(serving, n_beside)
    for _ in range(4):
        serving.step()
    serving.model.computed.clear()
    device.n_chunks = 0
    compute(serving, 4000, 9000)
    assert device.n_chunks > 20 * (n_beside > 0)
    learned_s = serving.plugin.limits.pace.seconds(0, 4000)
    assert learned_s is not None and learned_s == pytest.approx(
        4000e-3 + 4000 / 512 * 0.02, rel=0.02
    )
    # 0.3 s suffice for a step and 200 tokens. The first chunks show how long chunks wait.
    chunks = [max(rows) for rows in serving.model.computed if max(rows) > 1]
    assert (sorted(chunks)[len(chunks) // 2] == 192) is (n_beside > 0), chunks
    device.slowness = 3.0
    compute(serving, 4000, 9000, 4000, 9000)
    slow_s = serving.plugin.limits.pace.seconds(0, 4000)
    # Chunks of 0.25 s may count with a step of 0.08 s.
    assert slow_s is not None and 2.7 < slow_s / learned_s < 3 * 1.4


def test_device_computes_a_chunk_directly_after_the_step_of_the_replies(
    serve: Callable[..., Serving], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The chunk is submitted while the step runs, so that the device is not idle between them."""
    serving, device = serve(max_chunk=64, max_stall_s=0.4), Device(monkeypatch)
    beside_replies(serving, 2)
    device.n_chunks = device.n_idle = 0
    serving.run(serving.ask(4000, 500))
    assert device.n_chunks >= 8 and device.n_idle == 0


def is_step(arrays: tuple[Any, ...]) -> bool:
    """Whether the arrays are the tokens of a step, not the caches of a chunk."""
    return isinstance(arrays[0], mx.array)


def compute(serving: Serving, *firsts: int) -> None:
    """Compute prompts of 4,000 tokens, one after the other, up to their first reply tokens."""
    for first in firsts:
        asked = serving.ask(first, 4000)
        while not asked.answer:
            serving.step()


def beside_replies(serving: Serving, n_replies: int) -> None:
    for n in range(n_replies):
        running = serving.ask(1000 * n, 20, 4000)
        while not running.answer:
            serving.step()


class Unmergeable(KVCache):  # type: ignore[misc]
    """A cache that cannot become a batch, or join one."""

    def merge(self, caches: Any) -> Any:
        raise RuntimeError("bad luck")


def test_caches_that_cannot_be_merged_end_only_their_request(
    serve: Callable[..., Serving],
) -> None:
    serving = serve(max_chunk=64)
    bad = Client(serving.plugin, 2000, 50)
    (bad.uid,) = serving.generator.insert_segments(
        segments=[[bad.ids]], max_tokens=[4], caches=[[Unmergeable()]], all_tokens=[bad.tokens[:0]]
    )
    serving.clients[bad.uid] = bad
    serving.run(good := serving.ask(1000, 100))
    assert good.answer == right_answer(good)
    assert "bad luck" in str(bad.error) and not bad.answer
    assert not serving.generator.prefills.all, "the failed prompt is still queued"


def test_failed_join_ends_all_replies_but_not_the_server(
    serve: Callable[..., Serving], monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = serve(max_chunk=64)
    running = serving.ask(1000, 20, 100)
    while not running.answer:
        serving.step()
    with monkeypatch.context() as patch:

        def fails(*_: Any) -> None:
            raise RuntimeError("bad luck")

        patch.setattr("mlx_lm.models.cache.BatchKVCache.extend", fails)
        joins = serving.ask(2000, 20)
        while not joins.context._should_stop:
            serving.step()
    assert all("bad luck" in str(client.error) for client in (running, joins))
    serving.run(again := serving.ask(3000, 70))
    assert again.answer == right_answer(again)


def step_until_failed(serving: Serving, client: Client) -> None:
    while not client.context._should_stop:
        serving.step()


POISONED = {"prompt": (POISON - 5, 20), "last token": (POISON - 19, 20), "reply": (POISON - 20, 20)}
"""First ids and lengths of prompts that fail in a chunk, at their last token, or in their reply."""


@pytest.mark.parametrize("place", POISONED)
def test_consecutive_failed_requests_end_the_server(
    serve: Callable[..., Serving], place: str
) -> None:
    """The chunks that succeed before a failure do not reset the count."""
    serving = serve(max_chunk=64)
    for _ in range(MOST_IN_A_ROW - 1):
        step_until_failed(serving, serving.ask(*POISONED[place]))
    serving.run(serving.ask(1000, 70))  # the count starts again
    for _ in range(MOST_IN_A_ROW - 1):
        step_until_failed(serving, serving.ask(*POISONED[place]))
    with pytest.raises(DeviceFailed, match="8 steps in a row failed"):
        step_until_failed(serving, serving.ask(*POISONED[place]))


@pytest.mark.parametrize("is_replying", [True, False])
def test_repeated_failures_of_prompts_do_not_end_a_healthy_request(
    serve: Callable[..., Serving], is_replying: bool
) -> None:
    serving = serve(max_chunk=64)
    n_prompt, max_tokens = (20, 300) if is_replying else (4000, 4)
    good = serving.ask(1000, n_prompt, max_tokens)
    for _ in range(3 * MOST_IN_A_ROW):
        step_until_failed(serving, serving.ask(*POISONED["prompt"]))
    assert not good.error and bool(good.answer) == is_replying
    while len(good.answer) < max_tokens:
        serving.step()


@pytest.mark.parametrize("n_poisoned", [MOST_IN_A_ROW - 2, MOST_IN_A_ROW - 1])
def test_joint_failures_and_single_failures_of_prompts_are_counted(
    serve: Callable[..., Serving], n_poisoned: int
) -> None:
    serving = serve(max_chunk=512, joins=True)
    bad = [serving.ask(POISON - 5, 20) for _ in range(n_poisoned)]
    is_end = n_poisoned + 1 == MOST_IN_A_ROW  # one failure together, and one of each prompt
    with pytest.raises(DeviceFailed) if is_end else nullcontext():
        for client in bad:
            step_until_failed(serving, client)
    assert all("bad luck" in str(client.error) for client in bad)


def test_caches_that_cannot_be_copied_end_replies_but_not_the_server(
    serve: Callable[..., Serving], monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = serve(max_chunk=64)
    running = serving.ask(1000, 20, 100)
    with monkeypatch.context() as patch:

        def fails(*_: Any) -> None:
            raise RuntimeError("no memory")

        patch.setattr(serving.generator, "_copy_rows", fails)
        step_until_failed(serving, running)
        assert "no memory" in str(running.error)
    serving.run(again := serving.ask(3000, 70))
    assert again.answer == right_answer(again)


@pytest.mark.parametrize("n_long", [2, 7, 8, 9])
def test_short_prompt_does_not_wait_for_many_long_prompts(
    serve: Callable[..., Serving], n_long: int
) -> None:
    """The prompt begins also if the server already computes its maximum number of prompts."""
    serving = serve(max_chunk=64)
    for n in range(n_long):
        serving.ask(1000 * (n + 1), 3000 + n)
    for _ in range(3 * n_long):
        serving.step()
    short = serving.ask(15_000, 120)
    n_before = len(serving.order)
    while not short.answer:
        serving.step()
        assert len(serving.order) < n_before + 50
    others = [first for first in serving.order[n_before:] if first != 15_000]
    assert len(others) <= 3, others
    assert len(serving.generator.queue) == max(0, n_long - 8)


def test_freed_memory_is_given_back_during_a_long_reply(
    serve: Callable[..., Serving], monkeypatch: pytest.MonkeyPatch
) -> None:
    serving = serve(max_chunk=64)
    client = serving.ask(1000, 20, max_tokens=1100)
    while not client.answer:
        serving.step()
    cleared: list[int] = []
    monkeypatch.setattr(mx, "clear_cache", lambda: cleared.append(len(client.answer)))
    while len(client.answer) < 1090:
        serving.step()
    assert len(cleared) == 2


def test_error_does_not_keep_the_caches_of_its_prompt_alive(
    serve: Callable[..., Serving], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Pytest keeps log records with their tracebacks.
    monkeypatch.setattr(
        "mlx_lm_kvpersist.host.scheduling.batch_generator.logger.error", lambda *_, **__: None
    )
    serving = serve(max_chunk=64)
    client = serving.ask(1000, 400)
    serving.generator.queue[0].segments[1][-2] = POISON
    serving.step()
    computed = weakref.ref(serving.generator.prefills.all[0])
    while serving.generator.prefills.all:
        serving.step()
    error = client.error  # the client's thread keeps the error, too
    gc.collect()
    assert error is not None and computed() is None
