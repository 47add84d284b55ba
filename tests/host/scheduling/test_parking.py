"""Replies that leave the batch if memory is short, and later continue with the same tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from types import ModuleType, SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache

from mlx_lm_kvpersist.host.hooks import (
    PARKED,
    ModelSupport,
    PrefillLimits,
    Prepared,
    Prompt,
)
from mlx_lm_kvpersist.host.scheduling import batch_generator, prompt_lookup
from mlx_lm_kvpersist.host.scheduling.model_provider import PluginCaches

from .test_prefill import VOCABULARY, Client, Counting, Plugin, Saving, Serving

N_TOKENS = 40


class Scales:
    """Has room for `most` tokens of replies, and notes what it is told."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.told: list[tuple[list[int], list[int], int | None]] = []

    def weigh(self, replies: Sequence[int], prompts: Sequence[int], n_bytes: int | None) -> bool:
        self.told.append((list(replies), list(prompts), n_bytes))
        return sum(replies) <= self.most


class Kept(Saving):
    """A request whose parked replies may enter when there is room, with their saved tokens."""

    is_free = False
    keeps = True

    def insert(self, tokens: Sequence[int], caches: list[Any], cache_type: str) -> None:
        super().insert(tokens, caches, cache_type)
        if cache_type == PARKED:
            self.kept = KVCache()
            keys, values = (mx.array(x[:, :, : len(tokens)]) for x in caches[0].state[:2])
            self.kept.keys, self.kept.values, self.kept.offset = keys, values, len(tokens)
            self.parked = list(tokens)

    def advance(self) -> bool:
        return self.is_free

    def enter(self) -> Prepared:
        assert list(self.prompt.ids[:-1]) == self.parked
        if not self.keeps:
            return Prepared(self.prompt)
        return Prepared(self.prompt, [self.kept], len(self.parked))


@pytest.fixture
def serve(
    patched_server: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., tuple[Serving, Scales]]]:
    monkeypatch.setattr(batch_generator, "WEIGH_EVERY", 4)
    monkeypatch.setattr("tests.host.scheduling.test_prefill.Saving", Kept)
    made = []

    def start(most: int) -> tuple[Serving, Scales]:
        plugin = Plugin(PrefillLimits(1.0, lambda position: 64))
        scales, model = Scales(most), Counting()
        support = ModelSupport(
            list, limits=plugin.limits, weigh=scales.weigh, most_taken_back=lambda caches: 17
        )
        model.make_cache = PluginCaches(model, "saves", support)
        stream = mx.default_stream(mx.default_device())
        made.append(patched_server.BatchGenerator(model, stream=stream))
        return Serving(made[-1], plugin, model), scales

    yield start
    for generator in reversed(made):
        generator.close()


def request_of(client: Client) -> Kept:
    request = client.tokens.taken.request
    assert isinstance(request, Kept)
    return request


def finish(serving: Serving, *clients: Client, most: int = 300) -> None:
    for _ in range(most):
        serving.step()
        if all(len(client.answer) == N_TOKENS for client in clients):
            return
    raise AssertionError([len(client.answer) for client in clients])


def right(client: Client) -> list[int]:
    return [(client.ids[-1] + n) % VOCABULARY for n in range(1, N_TOKENS + 1)]


def test_an_account_that_fails_is_logged_once_and_has_room(
    serve: Callable[..., tuple[Serving, Scales]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def weigh(*_: object) -> bool:
        raise RuntimeError("bug")

    monkeypatch.setattr(Scales, "weigh", weigh)
    serving, _ = serve(0)
    client = serving.ask(1000, 40, N_TOKENS)
    finish(serving, client)
    assert client.answer == right(client)
    assert len([one for one in caplog.records if "plugin saves failed" in one.message]) == 1


@pytest.mark.parametrize("keeps", [True, False])
def test_the_youngest_goes_on_with_the_same_tokens(
    serve: Callable[..., tuple[Serving, Scales]], monkeypatch: pytest.MonkeyPatch, keeps: bool
) -> None:
    """With or without its saved tokens."""
    monkeypatch.setattr(Kept, "keeps", keeps)
    serving, scales = serve(most=150)
    clients = [serving.ask(1000 * i, 40, N_TOKENS) for i in (1, 2, 3)]
    finish(serving, *clients)
    assert [client.answer for client in clients] == [right(client) for client in clients]
    parked = [first for first, kind, *_ in serving.plugin.saved if kind == PARKED]
    assert parked[0] == 3000 and 1000 not in parked
    assert sum(scales.told[-1][0]) <= 150
    for _, kind, tokens, keys in serving.plugin.saved:
        assert kind != PARKED or tokens == keys
    chunks = [rows for rows in serving.model.computed if max(rows) > 1]
    assert (len(chunks) == 6) == keeps  # two segments a prompt


def test_a_parked_reply_has_no_token_of_a_draft(
    serve: Callable[..., tuple[Serving, Scales]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has drafts while it is alone, before and after parking; the drafts' ends are wrong."""
    clock = SimpleNamespace(perf_counter=count().__next__)  # no step is slow
    monkeypatch.setattr(prompt_lookup, "time", clock)
    monkeypatch.setattr(
        Kept, "draft_ids", lambda self, run, n: [run[-1] + 1, run[-1] + 2, 7, 8][:n]
    )
    serving, _ = serve(most=120)
    clients = [serving.ask(1000, 40, N_TOKENS)]
    while len(clients[0].answer) < 9:
        serving.step()
    clients += [serving.ask(1000 * i, 40, N_TOKENS) for i in (2, 3)]
    n_before = len(serving.model.computed)
    finish(serving, *clients)
    assert [client.answer for client in clients] == [right(client) for client in clients]
    saved = [(tokens, keys) for _, kind, tokens, keys in serving.plugin.saved if kind == PARKED]
    assert saved and all(tokens == keys for tokens, keys in saved)
    for computed in (serving.model.computed[:n_before], serving.model.computed[-3:]):
        assert any(1 < rows[0] < 5 for rows in computed), "no drafts"


def test_what_is_told_is_what_runs(serve: Callable[..., tuple[Serving, Scales]]) -> None:
    serving, scales = serve(most=1000)
    serving.ask(1000, 40, N_TOKENS)
    serving.step()
    replies, prompts, n_bytes = scales.told[0]
    assert (replies, prompts) == ([], [40]) and n_bytes == 0
    while not scales.told[-1][0]:
        serving.step()
    n_told = len(scales.told)
    for _ in range(8):
        serving.step()
    assert len(scales.told) == n_told + 2  # every fourth step, if no row comes or goes
    replies, prompts, n_bytes = scales.told[-1]
    generator = serving.generator
    assert prompts == [] and abs(replies[0] - len(generator.replies.tokens[0])) <= 4
    assert n_bytes == generator.prompt_cache_nbytes


def test_alone_a_reply_goes_on_whatever_it_takes(
    serve: Callable[..., tuple[Serving, Scales]],
) -> None:
    serving, _ = serve(most=10)
    finish(serving, client := serving.ask(1000, 40, N_TOKENS))
    assert client.answer == right(client)
    assert not [kind for _, kind, *_ in serving.plugin.saved if kind == PARKED]


def parked_one(serving: Serving) -> Client:
    _, second = (serving.ask(1000 * i, 40, N_TOKENS) for i in (1, 2))
    while not serving.generator.parked:
        serving.step()
    return second


def test_it_enters_beside_others_as_soon_as_the_plugin_says_so(
    serve: Callable[..., tuple[Serving, Scales]],
) -> None:
    serving, scales = serve(most=90)
    second = parked_one(serving)
    n_before = len(second.answer)
    for _ in range(5):
        serving.step()
    assert len(second.answer) == n_before
    scales.most, request_of(second).is_free = 1000, True
    for _ in range(3):
        serving.step()
    assert len(second.answer) > n_before


def test_stock_sees_what_is_parked(serve: Callable[..., tuple[Serving, Scales]]) -> None:
    """Parked replies have no caches; `next_generated` ends only when none is left."""
    serving, scales = serve(most=90)
    second = parked_one(serving)
    generator = serving.generator
    assert generator.extract_cache([second.uid]) == {second.uid: ([], [])}
    assert scales.told[-1][1] == [], "no memory is counted for it while parked"
    n_before = len(second.answer)
    tokens = []
    while responses := generator.next_generated():
        tokens += [one.token for one in responses if one.uid == second.uid]
    assert tokens == right(second)[n_before:]


@pytest.mark.parametrize("how", ["left", "removed"])
def test_a_client_that_leaves_while_its_reply_is_parked_is_forgotten(
    serve: Callable[..., tuple[Serving, Scales]], how: str
) -> None:
    serving, _ = serve(most=90)
    second = parked_one(serving)
    if how == "left":
        second.request.client_gone = True
    else:
        serving.generator.remove([second.uid])
    serving.step()
    assert not serving.generator.parked
    n_before = len(second.answer)
    finish(serving, serving.clients[0])
    assert len(second.answer) == n_before


def test_a_parked_reply_keeps_its_sampler_and_its_processors(
    serve: Callable[..., tuple[Serving, Scales]],
) -> None:
    """A processor sees the same tokens as without a pause, and the count continues."""
    serving, _ = serve(most=90)
    seen: list[int] = []

    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        seen.append(int(tokens.size))
        return logits

    first = serving.ask(1000, 40, N_TOKENS)
    client = Client(serving.plugin, 2000, 40)
    (client.uid,) = serving.generator.insert_segments(
        segments=[[client.ids]],
        max_tokens=[N_TOKENS],
        caches=[[KVCache()]],
        all_tokens=[client.tokens[:0]],
        samplers=[lambda logprobs: mx.argmax(logprobs, axis=-1)],
        logits_processors=[[processor]],
    )
    serving.clients[client.uid] = client
    finish(serving, first, client)
    assert [kind for _, kind, *_ in serving.plugin.saved if kind == PARKED]
    assert client.answer == right(client)
    assert seen == list(range(40, 40 + len(seen)))


def test_what_is_asked_of_a_prompt_that_returns_is_a_prompt(
    serve: Callable[..., tuple[Serving, Scales]],
) -> None:
    serving, _ = serve(most=90)
    second = parked_one(serving)
    prompt = request_of(second).prompt
    assert isinstance(prompt, Prompt)
    assert list(prompt.ids) == [*second.ids, *right(second)][: len(prompt.ids)]
