"""Parking: if memory is short, a reply leaves the batch, and later continues unchanged."""

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


class Account:
    """A memory account for `max_tokens` of replies, which records the calls of `weigh`."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.calls: list[tuple[list[int], list[int], int | None]] = []

    def weigh(self, replies: Sequence[int], prompts: Sequence[int], n_bytes: int | None) -> bool:
        self.calls.append((list(replies), list(prompts), n_bytes))
        return sum(replies) <= self.max_tokens


class ParkedRequest(Saving):
    """A request that saves the caches of its parked reply, and may restore them to enter."""

    may_enter = False
    restores = True

    def insert(self, tokens: Sequence[int], caches: list[Any], cache_type: str) -> None:
        super().insert(tokens, caches, cache_type)
        if cache_type == PARKED:
            self.cache = KVCache()
            keys, values = (mx.array(x[:, :, : len(tokens)]) for x in caches[0].state[:2])
            self.cache.keys, self.cache.values, self.cache.offset = keys, values, len(tokens)
            self.parked = list(tokens)

    def advance(self) -> bool:
        return self.may_enter

    def enter(self) -> Prepared:
        assert list(self.prompt.ids[:-1]) == self.parked
        if not self.restores:
            return Prepared(self.prompt)
        return Prepared(self.prompt, [self.cache], len(self.parked))


@pytest.fixture
def serve(
    patched_server: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., tuple[Serving, Account]]]:
    monkeypatch.setattr(batch_generator, "WEIGH_EVERY", 4)
    monkeypatch.setattr("tests.host.scheduling.test_prefill.Saving", ParkedRequest)
    made = []

    def start(max_tokens: int) -> tuple[Serving, Account]:
        plugin = Plugin(PrefillLimits(1.0, lambda position: 64))
        account, model = Account(max_tokens), Counting()
        support = ModelSupport(
            list, limits=plugin.limits, weigh=account.weigh, most_taken_back=lambda caches: 17
        )
        model.make_cache = PluginCaches(model, "saves", support)
        stream = mx.default_stream(mx.default_device())
        made.append(patched_server.BatchGenerator(model, stream=stream))
        return Serving(made[-1], plugin, model), account

    yield start
    for generator in reversed(made):
        generator.close()


def request_of(client: Client) -> ParkedRequest:
    request = client.tokens.taken.request
    assert isinstance(request, ParkedRequest)
    return request


def finish(serving: Serving, *clients: Client, max_steps: int = 300) -> None:
    for _ in range(max_steps):
        serving.step()
        if all(len(client.answer) == N_TOKENS for client in clients):
            return
    raise AssertionError([len(client.answer) for client in clients])


def right_answer(client: Client) -> list[int]:
    return [(client.ids[-1] + n) % VOCABULARY for n in range(1, N_TOKENS + 1)]


def test_failing_memory_account_is_logged_once_and_the_reply_continues(
    serve: Callable[..., tuple[Serving, Account]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def weigh(*_: object) -> bool:
        raise RuntimeError("bug")

    monkeypatch.setattr(Account, "weigh", weigh)
    serving, _ = serve(0)
    client = serving.ask(1000, 40, N_TOKENS)
    finish(serving, client)
    assert client.answer == right_answer(client)
    assert len([entry for entry in caplog.records if "plugin saves failed" in entry.message]) == 1


@pytest.mark.parametrize("restores", [True, False])
def test_youngest_reply_is_parked_and_continues_with_the_same_tokens(
    serve: Callable[..., tuple[Serving, Account]], monkeypatch: pytest.MonkeyPatch, restores: bool
) -> None:
    """The caches of the parked reply are restored, or computed again."""
    monkeypatch.setattr(ParkedRequest, "restores", restores)
    serving, account = serve(max_tokens=150)
    clients = [serving.ask(1000 * i, 40, N_TOKENS) for i in (1, 2, 3)]
    finish(serving, *clients)
    assert [client.answer for client in clients] == [right_answer(client) for client in clients]
    parked = [first for first, kind, *_ in serving.plugin.saved if kind == PARKED]
    assert parked[0] == 3000 and 1000 not in parked
    assert sum(account.calls[-1][0]) <= 150
    for _, kind, tokens, keys in serving.plugin.saved:
        assert kind != PARKED or tokens == keys
    chunks = [rows for rows in serving.model.computed if max(rows) > 1]
    assert (len(chunks) == 6) == restores  # two segments of each prompt


def test_parked_reply_is_saved_without_draft_tokens(
    serve: Callable[..., tuple[Serving, Account]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reply has drafts while it is alone, before and after parking; the last drafts are wrong."""
    clock = SimpleNamespace(perf_counter=count().__next__)  # no step is slow
    monkeypatch.setattr(prompt_lookup, "time", clock)
    monkeypatch.setattr(
        ParkedRequest, "draft_ids", lambda self, run, n: [run[-1] + 1, run[-1] + 2, 7, 8][:n]
    )
    serving, _ = serve(max_tokens=120)
    clients = [serving.ask(1000, 40, N_TOKENS)]
    while len(clients[0].answer) < 9:
        serving.step()
    clients += [serving.ask(1000 * i, 40, N_TOKENS) for i in (2, 3)]
    n_before = len(serving.model.computed)
    finish(serving, *clients)
    assert [client.answer for client in clients] == [right_answer(client) for client in clients]
    saved = [(tokens, keys) for _, kind, tokens, keys in serving.plugin.saved if kind == PARKED]
    assert saved and all(tokens == keys for tokens, keys in saved)
    for computed in (serving.model.computed[:n_before], serving.model.computed[-3:]):
        assert any(1 < rows[0] < 5 for rows in computed), "no drafts"


def test_memory_account_gets_the_lengths_and_bytes_of_running_sequences(
    serve: Callable[..., tuple[Serving, Account]],
) -> None:
    serving, account = serve(max_tokens=1000)
    serving.ask(1000, 40, N_TOKENS)
    serving.step()
    replies, prompts, n_bytes = account.calls[0]
    assert (replies, prompts) == ([], [40]) and n_bytes == 0
    while not account.calls[-1][0]:
        serving.step()
    n_calls = len(account.calls)
    for _ in range(8):
        serving.step()
    assert len(account.calls) == n_calls + 2  # every fourth step, if no row joins or leaves
    replies, prompts, n_bytes = account.calls[-1]
    generator = serving.generator
    assert prompts == [] and abs(replies[0] - len(generator.replies.tokens[0])) <= 4
    assert n_bytes == generator.prompt_cache_nbytes


def test_single_reply_is_never_parked(
    serve: Callable[..., tuple[Serving, Account]],
) -> None:
    serving, _ = serve(max_tokens=10)
    finish(serving, client := serving.ask(1000, 40, N_TOKENS))
    assert client.answer == right_answer(client)
    assert not [kind for _, kind, *_ in serving.plugin.saved if kind == PARKED]


def park_second_reply(serving: Serving) -> Client:
    _, second = (serving.ask(1000 * i, 40, N_TOKENS) for i in (1, 2))
    while not serving.generator.parked:
        serving.step()
    return second


def test_parked_reply_continues_as_soon_as_the_plugin_allows_it(
    serve: Callable[..., tuple[Serving, Account]],
) -> None:
    serving, account = serve(max_tokens=90)
    second = park_second_reply(serving)
    n_before = len(second.answer)
    for _ in range(5):
        serving.step()
    assert len(second.answer) == n_before
    account.max_tokens, request_of(second).may_enter = 1000, True
    for _ in range(3):
        serving.step()
    assert len(second.answer) > n_before


def test_stocks_methods_include_parked_replies(
    serve: Callable[..., tuple[Serving, Account]],
) -> None:
    """A parked reply has no caches; `next_generated` continues until the reply has ended."""
    serving, account = serve(max_tokens=90)
    second = park_second_reply(serving)
    generator = serving.generator
    assert generator.extract_cache([second.uid]) == {second.uid: ([], [])}
    assert account.calls[-1][1] == [], "no memory is counted for a parked reply"
    n_before = len(second.answer)
    tokens = []
    while responses := generator.next_generated():
        tokens += [response.token for response in responses if response.uid == second.uid]
    assert tokens == right_answer(second)[n_before:]


@pytest.mark.parametrize("reason", ["left", "removed"])
def test_parked_reply_is_dropped_if_its_request_ends(
    serve: Callable[..., tuple[Serving, Account]], reason: str
) -> None:
    serving, _ = serve(max_tokens=90)
    second = park_second_reply(serving)
    if reason == "left":
        second.request.client_gone = True
    else:
        serving.generator.remove([second.uid])
    serving.step()
    assert not serving.generator.parked
    n_before = len(second.answer)
    finish(serving, serving.clients[0])
    assert len(second.answer) == n_before


def test_parked_reply_keeps_its_sampler_and_logits_processors(
    serve: Callable[..., tuple[Serving, Account]],
) -> None:
    """At each step, also after parking, the processor gets one more token."""
    serving, _ = serve(max_tokens=90)
    n_tokens_seen: list[int] = []

    def processor(tokens: mx.array, logits: mx.array) -> mx.array:
        n_tokens_seen.append(int(tokens.size))
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
    assert client.answer == right_answer(client)
    assert n_tokens_seen == list(range(40, 40 + len(n_tokens_seen)))


def test_parked_request_has_a_prompt_with_all_its_ids(
    serve: Callable[..., tuple[Serving, Account]],
) -> None:
    serving, _ = serve(max_tokens=90)
    second = park_second_reply(serving)
    prompt = request_of(second).prompt
    assert isinstance(prompt, Prompt)
    assert list(prompt.ids) == [*second.ids, *right_answer(second)][: len(prompt.ids)]
