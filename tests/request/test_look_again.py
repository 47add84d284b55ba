"""A prompt is looked up once, on its HTTP thread; later changes of blocks are found by key."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from mlx_lm_kvpersist.host.hooks import REPLY, ClientRequest, Prompt
from mlx_lm_kvpersist.match import TokenText
from mlx_lm_kvpersist.plugin import KVPersistPlugin
from mlx_lm_kvpersist.request import lookup
from mlx_lm_kvpersist.request.lookup import Lookup
from mlx_lm_kvpersist.request.memory import Memory
from mlx_lm_kvpersist.request.serving import (
    SHORT_REPLY,
    RequestState,
    ServedRequest,
    Serving,
    Stage,
)
from mlx_lm_kvpersist.store.records import Commit, Gone
from tests.support.store_files import block_path

from .conftest import Conversations
from .test_lookup import respelled, sampled_turn

pytestmark = pytest.mark.parametrize("loaded", ["byte-level"], indirect=True)

MAX_MATCHED = 512
LONG = MAX_MATCHED + 1300
"""The length of a prompt that is too long for matching all of its text."""


@pytest.fixture(autouse=True)
def few_matched_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat shorter prompts as long, so that the tests compute fewer tokens."""
    monkeypatch.setattr(lookup, "MAX_MATCHED_TOKENS", MAX_MATCHED)


def look_up(talk: Conversations, ids: list[int]) -> Lookup:
    return Lookup(Prompt(ids, [ids], ["user"]), talk.root, talk.store, talk.loaded)


@contextmanager
def decoded_tokens() -> Iterator[list[int]]:
    """Count the tokens whose text this thread reads."""
    counts, own = [0], threading.get_ident()

    def counting(method: Any) -> Any:
        def counted(self: TokenText, ids: Any, *more: Any) -> Any:
            ids = list(ids)
            counts[0] += len(ids) if threading.get_ident() == own else 0
            return method(self, ids, *more)

        return counted

    names = ("to_bytes", "feed", "ends", "n_bytes_ends", "covers", "control_places")
    patches = {name: counting(getattr(TokenText, name)) for name in names}
    with mock.patch.multiple(TokenText, **patches):
        yield counts


@pytest.fixture
def serving(talk: Conversations) -> Iterator[Serving]:
    memory = Memory(1 << 34, 0, talk.store, talk.loaded)
    yield Serving(talk.store, talk.loaded, lambda *_: None, False, 0.1, memory)
    memory.close()


def prepared(serving: Serving, ids: list[int]) -> tuple[ClientRequest, Prompt]:
    """Return a request whose prompt was looked up on an HTTP thread."""
    request = ClientRequest(SimpleNamespace(request_type="text", prompt="", messages=[]))
    prompt = Prompt(ids, [ids], ["user"], [{"role": "user", "content": "a question"}])
    thread = threading.Thread(target=serving.look_up, args=(RequestState.of(request), prompt))
    thread.start()
    thread.join(60)
    return request, prompt


@pytest.mark.parametrize("committed", ["nothing", "another conversation"])
def test_the_generation_thread_reads_no_text_of_a_stored_prompt(
    talk: Conversations, serving: Serving, committed: str
) -> None:
    ids = sampled_turn(talk.loaded, LONG)
    talk.remember(ids, n_prompt=LONG - 10)
    spelled = respelled(talk.loaded, ids, LONG - 200)
    request, prompt = prepared(serving, [*spelled, 5, 6])
    if committed != "nothing":
        talk.remember(sampled_turn(talk.loaded, 600, seed=8)[::-1], n_prompt=300)
    with decoded_tokens() as counts:
        served = ServedRequest(serving, request, prompt)
        assert served.advance()
        entered = served.enter()
    assert entered.n_cached > LONG - 400 and len(entered.prompt.ids) < len(spelled) + 2
    assert counts[0] <= (0 if committed == "nothing" else MAX_MATCHED)


def test_a_request_passes_its_stages_and_stays_done(talk: Conversations, serving: Serving) -> None:
    request, prompt = prepared(serving, sampled_turn(talk.loaded, 300))
    state, served = RequestState.of(request), ServedRequest(serving, request, prompt)
    stages = [state.stage]
    assert served.advance()
    stages.append(state.stage)
    served.enter()
    stages.append(state.stage)
    caches = talk.loaded.spec.make_cache()
    talk.forward(list(prompt.ids), caches)
    served.insert(prompt.ids, caches, "user")
    stages.append(state.stage)
    talk.forward([7], caches)
    served.insert([*prompt.ids, 7], caches, REPLY)
    stages.append(state.stage)
    state.move(Stage.DECODE)
    assert [*stages, state.stage] == [
        Stage.NEW,
        Stage.READY,
        Stage.PREFILL,
        Stage.DECODE,
        Stage.DONE,
        Stage.DONE,
    ]


def test_a_lookup_for_another_model_is_not_used(talk: Conversations, serving: Serving) -> None:
    request, prompt = prepared(serving, sampled_turn(talk.loaded, 300))
    before = RequestState.of(request).lookup
    assert before is not None
    serving.model = replace(talk.loaded, fingerprint="another")
    ServedRequest(serving, request, prompt)
    after = RequestState.of(request).lookup
    assert after is not before and after is not None
    assert after.root.fingerprint == "another"


@pytest.mark.parametrize("n_prompt", [900, LONG])
@pytest.mark.parametrize("n_stored", [0, 500])
def test_blocks_stored_after_the_lookup_are_used(
    talk: Conversations, n_prompt: int, n_stored: int
) -> None:
    """Two requests of one conversation may come at once."""
    ids = sampled_turn(talk.loaded, n_prompt)
    if n_stored:
        talk.remember(ids[:n_stored], n_prompt=n_stored - 5)
    prompt_lookup = look_up(talk, [*ids, 5, 6])
    assert prompt_lookup.stored.n_tokens == n_stored
    talk.remember(ids, n_prompt=n_prompt - 5)
    with decoded_tokens() as counts:
        assert prompt_lookup.restore().outcome.n_reused == n_prompt
    assert n_prompt < LONG or counts[0] <= MAX_MATCHED


def test_a_reply_with_other_ids_stored_after_the_lookup_is_used(talk: Conversations) -> None:
    """The next turn may be queued before this turn is stored."""
    n_stored = 300
    ids = sampled_turn(talk.loaded, n_stored)
    talk.remember(ids, n_prompt=n_stored - 5)
    reply = talk.loaded.encode("What the model has answered to this, at some length.")
    prompt_lookup = look_up(talk, [*ids, *reply, *talk.loaded.encode(" Next"), 6])
    turn = [*ids, *respelled(talk.loaded, reply, 2)]
    assert len(turn) > len(ids) + len(reply)
    talk.remember(turn, n_prompt=n_stored)
    reuse = prompt_lookup.restore()
    assert reuse.outcome.n_reused >= len(turn) - 1
    assert list(reuse.prompt.ids[: len(turn) - 1]) == turn[:-1]


@pytest.mark.parametrize("n_left", [0, 1, 5])
def test_a_long_prompt_is_cut_at_a_deleted_block(talk: Conversations, n_left: int) -> None:
    """The rest of the text is not read again."""
    ids = sampled_turn(talk.loaded, LONG)
    talk.remember(ids, n_prompt=LONG - 10)
    talk.forget_hot_blocks()
    prompt_lookup = look_up(talk, [*ids, 5, 6])
    assert prompt_lookup.stored.n_tokens == LONG
    gone: Path = block_path(talk.store.folder, prompt_lookup.stored.match.path[n_left].key)
    gone.unlink()
    with decoded_tokens() as counts:
        outcome = prompt_lookup.restore().outcome
    assert outcome.n_reused == n_left * 256
    assert outcome.reason is not None and counts[0] <= MAX_MATCHED


@pytest.mark.parametrize("n_left", [0, 1, 5])
def test_a_restore_reads_no_block_from_an_evicted_one_on(
    talk: Conversations, n_left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the blocks before it would be joined twice."""
    ids = sampled_turn(talk.loaded, LONG)
    talk.remember(ids, n_prompt=LONG - 10)
    talk.forget_hot_blocks()
    prompt_lookup = look_up(talk, [*ids, 5, 6])
    path = prompt_lookup.stored.match.path
    for block in reversed(path[n_left:]):
        talk.store.disk.forget(block.key, Gone.EVICTED)
    talk.remember(sampled_turn(talk.loaded, 300, seed=8)[::-1], n_prompt=290)
    requested: list[bytes] = []
    load_all = talk.store.reader.load_all

    def load(records: Any, root: Any) -> Any:
        requested.extend(record.key for record in records)
        return load_all(records, root)

    monkeypatch.setattr(talk.store.reader, "load_all", load)
    outcome = prompt_lookup.restore().outcome
    assert outcome.n_reused == n_left * 256
    assert requested == [block.key for block in path[:n_left]]


def test_two_equal_prompts_compute_their_tokens_once(talk: Conversations, serving: Serving) -> None:
    ids = sampled_turn(talk.loaded, LONG)
    requests = [prepared(serving, ids) for _ in range(2)]
    first, second = (ServedRequest(serving, *request) for request in requests)
    assert first.advance() and first.enter().n_cached == 0
    assert not second.advance()
    caches = talk.loaded.spec.make_cache()
    talk.forward(ids[:-1], caches)
    first.insert(ids[:-1], caches, "user")
    while not second.advance():
        pass
    assert second.enter().n_cached == LONG - 1


def test_remembering_a_reply_reads_little_text_of_its_prompt(
    talk: Conversations, serving: Serving
) -> None:
    ids = sampled_turn(talk.loaded, LONG)
    talk.remember(ids, n_prompt=LONG - 10)
    request, prompt = prepared(serving, [*ids, 5])
    served = ServedRequest(serving, request, prompt)
    caches = list(served.enter().caches or ())
    reply = [7, 8, 9]  # without an end token
    talk.forward([5, *reply], caches)
    with decoded_tokens() as counts:
        served.insert([*prompt.ids, *reply], caches, REPLY)
        serving.remember(RequestState.of(request))
    assert RequestState.of(request).remembered
    assert 0 < counts[0] <= 4 * 256


@pytest.mark.parametrize(
    ("has_left", "order"),
    [
        (False, "insert timed sent"),
        (False, "sent insert timed"),
        (True, "leaves insert timed"),
        (True, "leaves timed insert"),
        (True, "insert leaves timed"),
    ],
)
def test_a_reply_is_remembered_with_the_text_that_was_sent(
    talk: Conversations, serving: Serving, has_left: bool, order: str
) -> None:
    """Only the generation thread remembers the replies of clients that have left."""
    request, prompt = prepared(serving, sampled_turn(talk.loaded, 300))
    plugin = KVPersistPlugin()
    plugin._serving = serving
    served = ServedRequest(serving, request, prompt)
    served.enter()
    caches = talk.loaded.spec.make_cache()
    talk.forward([*prompt.ids, 7, 8], caches)
    steps = {
        "leaves": lambda: setattr(request, "client_gone", True),
        "insert": lambda: served.insert([*prompt.ids, 7, 8], caches, REPLY),
        "timed": lambda: plugin.reply_timed(request, (0.1,)),
        "sent": lambda: plugin.reply_sent(request, "a text", "", []),
    }
    replies: list[bytes] = []
    commit = talk.store.commit

    def record_replies(made: Commit, *args: Any) -> None:
        replies.extend({*made.replies.values()})
        commit(made, *args)

    with mock.patch.object(talk.store, "commit", record_replies):
        for step in order.split():
            steps[step]()
    assert RequestState.of(request).remembered
    assert {*map(content_of, replies)} == ({""} if has_left else {"a text"})
    assert len(replies) == 1 or has_left


def content_of(reply: bytes) -> str:
    content: str = json.loads(reply)["content"]
    return content


def test_stored_draft_ids_are_read_once_for_a_longer_reply(
    talk: Conversations, serving: Serving
) -> None:
    request, prompt = prepared(serving, sampled_turn(talk.loaded, 300))
    served = ServedRequest(serving, request, prompt)
    with mock.patch.object(talk.store.runs, "read", return_value=True) as read:
        for _ in range(SHORT_REPLY - 1):
            served.draft_ids([1, 2, 3], 4)
        assert not read.called
        for _ in range(5):
            served.draft_ids([1, 2, 3], 4)
    assert read.call_count == 1
