"""Prefetching with the server's generation thread: which requests wait for which reads."""

from __future__ import annotations

import argparse
import copy
import gc
import importlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mlx_lm_kvpersist.cache.blocks import Joiner
from mlx_lm_kvpersist.cache.live.caches import SequenceQuantizedKVCache
from mlx_lm_kvpersist.host import manager
from mlx_lm_kvpersist.host.hooks import ClientRequest, Prompt
from mlx_lm_kvpersist.host.patching.patches import PATCH_SET, PATCHES
from mlx_lm_kvpersist.host.patching.probes import ARGS
from mlx_lm_kvpersist.host.scheduling.model_provider import PluginCaches
from mlx_lm_kvpersist.host.scheduling.waiting import ReplyQueue
from mlx_lm_kvpersist.plugin import KVPersistPlugin
from mlx_lm_kvpersist.request import lookup
from mlx_lm_kvpersist.request.lookup import Lookup
from mlx_lm_kvpersist.request.outcome import Kind, Outcome
from mlx_lm_kvpersist.request.serving import RequestState, Stage
from mlx_lm_kvpersist.store import database
from mlx_lm_kvpersist.store.block_store import BlockStore
from tests.support import synthetic_text, wait_until
from tests.support.store_files import block_path

ENDLESS = 100_000


@dataclass
class SentRequest:
    """A request and its result so far."""

    request: Any
    text: str = ""
    n_tokens: int = 0
    error: Exception | None = None
    context: Any = None
    thread: threading.Thread | None = None

    @property
    def outcome(self) -> Outcome:
        outcome = RequestState.of(ClientRequest.of(self.request)).outcome
        assert outcome is not None
        return outcome

    def wait_for_tokens(self) -> None:
        """Wait until the reply has some more tokens."""
        n_before = self.n_tokens
        wait_until(lambda: self.n_tokens > n_before + 3, "tokens of the running reply")


@dataclass
class Server:
    """The server without its HTTP part."""

    module: ModuleType
    plugin: KVPersistPlugin
    generator: Any
    model: str
    sent: list[SentRequest] = field(default_factory=list)

    @property
    def store(self) -> BlockStore:
        assert self.plugin._store is not None
        return self.plugin._store

    def ask(self, text: str, max_tokens: int = 4) -> SentRequest:
        """Send a prompt; another thread receives the reply."""
        request = self.module.CompletionRequest("text", text, [], None, None)
        sent = SentRequest(request)
        sent.thread = threading.Thread(target=self._take, args=(sent, max_tokens))
        sent.thread.start()
        self.sent.append(sent)
        return sent

    def served(self, text: str) -> SentRequest:
        """Send a prompt and wait for its reply."""
        sent = self.ask(text)
        assert sent.thread is not None
        sent.thread.join(60)
        assert sent.error is None
        return sent

    def args(self, max_tokens: int, model: str | None = None) -> Any:
        module = self.module
        return module.GenerationArguments(
            model=module.ModelDescription(model=model or self.model, draft=None, adapter=None),
            sampling=module.SamplingArguments(0.0, 1.0, 0, 0.0, 0.0, 0.0),
            logits=module.LogitsProcessorArguments(None, 0.0, 20, 0.0, 20, 0.0, 20),
            stop_words=[],
            max_tokens=max_tokens,
            num_draft_tokens=0,
            logprobs=False,
            top_logprobs=-1,
            seed=None,
            chat_template_kwargs=None,
        )

    def _take(self, sent: SentRequest, max_tokens: int) -> None:
        try:
            sent.context, responses = self.generator.generate(sent.request, self.args(max_tokens))
            for response in responses:
                sent.n_tokens += 1
                sent.text += response.text
        except Exception as error:
            sent.error = error

    def decode(self) -> SentRequest:
        """Start a reply that decodes until the test ends."""
        sent = self.ask(synthetic_text(30, seed=99), ENDLESS)
        sent.wait_for_tokens()
        return sent

    def forget_hot_blocks(self) -> None:
        # The last part of a reply is sent before the turn is saved.
        wait_until(lambda: not self.generator._serving, "the end of all replies")
        self.store.drain()
        self.store.pool.clear()

    def close(self) -> None:
        for sent in self.sent:
            if sent.context is not None:
                sent.context.stop()
        self.generator.stop_and_join()


@pytest.fixture
def server(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(lookup, "MIN_PREFETCH_BYTES", 0)
    plugin = KVPersistPlugin()
    parser = argparse.ArgumentParser()
    plugin.add_options(parser)
    options = ["--kvpersist-dir", str(tmp_path / "store")]
    args = parser.parse_args(options, copy.copy(ARGS))
    args.model = str(tiny_model)
    vars(args).update(decode_concurrency=8, prompt_concurrency=4, prefill_step_size=512)
    plugin.configure(args)
    plugins = manager.PluginManager()
    plugins.register(plugin)
    PATCH_SET.apply(PATCHES)
    try:
        with manager.using(plugins):
            module = importlib.import_module("mlx_lm.server")
            provider = module.ModelProvider(args)
            generator = module.ResponseGenerator(provider, module.LRUPromptCache(10))
            made = Server(module, plugin, generator, str(tiny_model))
            try:
                wait_until(lambda: provider.is_loaded(str(tiny_model)), "the model")
                yield made
            finally:
                made.close()
    finally:
        PATCH_SET.undo()
        plugin.shutdown()


class Reads:
    """The threads of reads of blocks. Each read first calls `first`."""

    def __init__(self, store: BlockStore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: list[str] = []
        self.first: Callable[[], object] = lambda: None
        self._read = store.reader.read
        monkeypatch.setattr(store.reader, "read", self._slowly)

    def _slowly(self, *args: Any, **named: Any) -> Any:
        self.threads.append(threading.current_thread().name)
        self.first()
        return self._read(*args, **named)

    def wait_for_begin(self) -> None:
        wait_until(lambda: bool(self.threads), "reading ahead")


@pytest.fixture
def reads(server: Server, monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(server.store, monkeypatch)


def n_pins(store: BlockStore) -> int:
    return sum(entry.prefetched for entry in store.pool._entries.values())


def test_running_replies_continue_while_blocks_are_prefetched(server: Server, reads: Reads) -> None:
    prompt = synthetic_text(1200)
    first = server.served(prompt)
    server.forget_hot_blocks()
    reads.first = server.decode().wait_for_tokens
    again = server.served(prompt)
    assert again.text == first.text
    assert again.outcome.tier == "disk" and again.outcome.n_restored >= 512
    assert len(reads.threads) >= 3 and set(reads.threads) == {"kvpersist-prefetch_0"}
    wait_until(lambda: n_pins(server.store) == 0, "written turns and no pins")
    assert server.served(prompt).outcome.tier == "ram"


def test_no_sequence_caches_are_kept_during_or_after_a_reply(
    server: Server,
) -> None:
    """Stock's loop keeps a reference to the caches that it saved last."""

    def n_sequence_caches() -> int:
        caches = (each for each in gc.get_objects() if isinstance(each, SequenceQuantizedKVCache))
        return sum(not cache.empty() for cache in caches) - n_before

    n_before = 0
    n_before = n_sequence_caches()
    sent = server.decode()
    assert n_sequence_caches() == 0  # the batch has caches of another class
    sent.context.stop()
    server.served(synthetic_text(1200))
    wait_until(lambda: not server.generator._serving, "the end of all replies")
    assert n_sequence_caches() == 0


def test_running_replies_continue_while_a_restore_is_joined(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two steps the restore takes a fifth of the longest stall, or joins one block."""
    prompt = synthetic_text(1500)
    first = server.served(prompt)
    server.forget_hot_blocks()
    add, put = Joiner.add, ReplyQueue.put
    n_items, added = 0, list[int]()

    def count_items(*args: Any) -> None:
        nonlocal n_items
        n_items += 1
        put(*args)

    def slowly(*args: Any) -> None:
        added.append(n_items)
        time.sleep(0.15)
        add(*args)

    monkeypatch.setattr(ReplyQueue, "put", count_items)
    monkeypatch.setattr(Joiner, "add", slowly)
    server.decode()
    again = server.served(prompt)
    assert again.text == first.text and again.outcome.tier == "disk"
    assert len(added) >= 4
    assert all(later > earlier for earlier, later in pairwise(added)), added


def test_running_replies_continue_while_a_prompt_is_tokenized(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt is tokenized once, on the thread of its client."""
    render, threads = type(server.generator)._render, []
    decoding = server.decode()

    def slowly(*args: Any) -> Any:
        threads.append(threading.current_thread())
        decoding.wait_for_tokens()
        return render(*args)

    monkeypatch.setattr(type(server.generator), "_render", slowly)
    sent = server.served(synthetic_text(40, seed=7))
    assert threads == [sent.thread]


def test_a_prompt_is_looked_up_once_on_its_clients_thread(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    find, threads = Lookup._find, list[threading.Thread]()

    def record_thread(*args: Any) -> Any:
        threads.append(threading.current_thread())
        return find(*args)

    monkeypatch.setattr(Lookup, "_find", record_thread)
    prompt = synthetic_text(400, seed=3)
    requests = []
    for _ in range(2):
        requests.append(server.served(prompt))
        server.forget_hot_blocks()  # a commit after the lookup would repeat the lookup
    assert threads == [request.thread for request in requests]


def test_a_blocked_lookup_delays_other_lookups_for_a_limited_time(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocked lookup keeps its connection to the index; other threads open new ones."""
    server.served(synthetic_text(40, seed=1))
    monkeypatch.setattr(database, "_TURN_S", 0.05)
    find, waits, may_go_on = Lookup._find, threading.Event(), threading.Event()

    def slowly(*args: Any) -> Any:
        if not waits.is_set():
            waits.set()
            may_go_on.wait(60)
        return find(*args)

    monkeypatch.setattr(Lookup, "_find", slowly)
    blocked = server.ask(synthetic_text(40, seed=2))
    assert waits.wait(60)
    assert server.served(synthetic_text(40, seed=3)).n_tokens and not blocked.n_tokens
    may_go_on.set()
    assert blocked.thread is not None
    blocked.thread.join(60)
    assert blocked.n_tokens and blocked.outcome.kind is Kind.MISS


def test_prompts_are_tokenized_ahead_only_for_the_loaded_model(server: Server) -> None:
    """Prompts that were tokenized for an unloaded model are tokenized again."""
    server.served(synthetic_text(40))
    request = server.module.CompletionRequest("text", "one two three", [], None, None)
    server.generator._render_ahead(request, server.args(4, model="another"))
    assert not hasattr(request, "rendered")
    server.generator._render_ahead(request, server.args(4))
    made = request.rendered
    tokenizer = server.generator.model_provider.tokenizer
    assert list(made.prompt.ids) == tokenizer.encode("one two three")
    request.rendered = replace(made, tokenizer=object(), prompt=Prompt([1], [[1]], ["user"]))
    assert server.generator._rendered(tokenizer, request, server.args(4)).prompt == made.prompt


def test_without_running_replies_a_restore_is_not_prefetched(server: Server, reads: Reads) -> None:
    prompt = synthetic_text(1200)
    first = server.served(prompt)
    server.forget_hot_blocks()
    reads.first = lambda: wait_until(lambda: len(reads.threads) > 1, "several reads at once")
    again = server.served(prompt)
    assert again.text == first.text and again.outcome.tier == "disk"
    assert not any("prefetch" in name for name in reads.threads)


def test_other_requests_pass_a_request_that_waits_for_its_prefetch(
    server: Server, reads: Reads
) -> None:
    prompt = synthetic_text(1200)
    server.served(prompt)
    server.forget_hot_blocks()
    server.decode()
    may_go_on = threading.Event()
    reads.first = partial(may_go_on.wait, 60)
    waiting = server.ask(prompt)
    reads.wait_for_begin()
    short = server.served(synthetic_text(40, seed=5))
    assert short.n_tokens and not waiting.n_tokens
    may_go_on.set()
    assert waiting.thread is not None
    waiting.thread.join(60)
    assert waiting.outcome.tier == "disk"


def test_the_writer_knows_the_number_of_running_replies(server: Server) -> None:
    writer = server.store.writer
    decoding = server.decode()
    server.served(synthetic_text(40))
    wait_until(lambda: writer._n_replies == 1, "a step of the reply")
    decoding.context.stop()
    wait_until(lambda: writer._n_replies == 0, "the end of serving")


def test_many_waiting_requests_are_all_restored(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [synthetic_text(200, seed=seed) for seed in range(12)]
    first = [server.served(prompt).text for prompt in prompts]
    server.forget_hot_blocks()
    server.decode()
    again = [server.ask(prompt) for prompt in prompts]
    for sent in again:
        assert sent.thread is not None
        sent.thread.join(60)
    assert [sent.error for sent in again] == [None] * len(prompts)
    assert [sent.outcome.tier for sent in again] == ["disk"] * len(prompts)
    assert [sent.text for sent in again] == first
    wait_until(lambda: n_pins(server.store) == 0, "written turns and no pins")


def test_a_client_that_leaves_during_a_prefetch_keeps_no_pins(server: Server, reads: Reads) -> None:
    """The server notices this when it writes to the client, and then stops the sequence."""
    prompt = synthetic_text(1200)
    server.served(prompt)
    server.forget_hot_blocks()
    decoding = server.decode()
    gone = server.ask(prompt, ENDLESS)
    reads.wait_for_begin()
    wait_until(lambda: gone.context is not None, "the request that waited")
    gone.context.stop()
    wait_until(lambda: n_pins(server.store) == 0, "letting go")
    decoding.wait_for_tokens()


def test_a_client_that_leaves_while_its_parked_reply_is_restored_keeps_no_pins(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory has room for one reply; then the parked reply's blocks are pinned and joined."""
    monkeypatch.setattr(PluginCaches, "weigh", lambda self, replies, *_: len(replies) < 2)
    monkeypatch.setattr(lookup, "MIN_STEPWISE_BYTES", 0)
    monkeypatch.setattr(Lookup, "advance", lambda *_: False)
    decoding = server.decode()
    gone = server.ask(synthetic_text(1200), ENDLESS)
    wait_until(lambda: gone.context is not None, "the beginning of the reply")
    request = ClientRequest.of(gone.request)
    state = RequestState.of(request)
    wait_until(lambda: state.stage is Stage.FETCHING, "the restore of the parked reply")
    assert state.sequence is not None and n_pins(server.store) > 0
    request.client_gone = True
    wait_until(lambda: n_pins(server.store) == 0, "no pins")
    decoding.wait_for_tokens()


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("spoil", [damage, Path.unlink], ids=["damaged", "deleted"])
def test_a_block_lost_during_a_prefetch_shortens_the_restore(
    server: Server, reads: Reads, spoil: Callable[[Path], None]
) -> None:
    prompt = synthetic_text(1200)
    first = server.served(prompt)
    server.forget_hot_blocks()
    root = RequestState.of(ClientRequest.of(first.request)).root
    assert root is not None
    (node,) = server.store.children(root.key)
    (second,) = server.store.children(node.key)
    server.decode()
    is_spoiled = threading.Event()
    reads.first = partial(is_spoiled.wait, 60)
    again = server.ask(prompt)
    reads.wait_for_begin()
    spoil(block_path(server.store.folder, second.key))
    is_spoiled.set()
    assert again.thread is not None
    again.thread.join(60)
    assert again.error is None and again.text == first.text
    assert again.outcome.n_restored == 256
    wait_until(lambda: n_pins(server.store) == 0, "written turns and no pins")


def test_a_prompt_is_computed_if_its_prefetch_fails(
    server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = synthetic_text(600)
    first = server.served(prompt)
    server.forget_hot_blocks()
    server.decode()

    def fail(*_: Any, **__: Any) -> Any:
        raise ValueError("a bug")

    monkeypatch.setattr(server.store.reader, "read", fail)
    again = server.served(prompt)
    assert again.text == first.text and again.outcome.n_reused == 0
    assert "prefetching failed" in caplog.text


def test_the_server_stops_during_a_prefetch(server: Server, reads: Reads) -> None:
    prompt = synthetic_text(1200)
    server.served(prompt)
    server.forget_hot_blocks()
    decoding = server.decode()
    reads.first = partial(time.sleep, 0.2)
    server.ask(prompt)
    reads.wait_for_begin()

    def end() -> None:
        decoding.context.stop()
        server.generator.stop_and_join()
        server.plugin.shutdown()

    ending = threading.Thread(target=end)
    ending.start()
    ending.join(60)
    assert not ending.is_alive()
