"""Reading ahead, with the server's own generation thread: which requests wait for which reads."""

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
from mlx_lm_kvpersist.host.scheduling.waiting import ReplyQueue
from mlx_lm_kvpersist.plugin import KVPersistPlugin
from mlx_lm_kvpersist.request import lookup
from mlx_lm_kvpersist.request.lookup import Lookup
from mlx_lm_kvpersist.request.outcome import Kind, Outcome
from mlx_lm_kvpersist.request.serving import RequestState
from mlx_lm_kvpersist.store import database
from mlx_lm_kvpersist.store.block_store import BlockStore
from tests.support import synthetic_text, wait_until
from tests.support.store_files import block_path

ENDLESS = 100_000


@dataclass
class Asked:
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

    def go_on(self) -> None:
        """Return when the reply has some more tokens."""
        n_before = self.n_tokens
        wait_until(lambda: self.n_tokens > n_before + 3, "tokens of the running reply")


@dataclass
class Server:
    """The server without its HTTP part."""

    module: ModuleType
    plugin: KVPersistPlugin
    generator: Any
    model: str
    asked: list[Asked] = field(default_factory=list)

    @property
    def store(self) -> BlockStore:
        assert self.plugin._store is not None
        return self.plugin._store

    def ask(self, text: str, max_tokens: int = 4) -> Asked:
        """Send a prompt; a thread of its own takes the reply."""
        request = self.module.CompletionRequest("text", text, [], None, None)
        asked = Asked(request)
        asked.thread = threading.Thread(target=self._take, args=(asked, max_tokens))
        asked.thread.start()
        self.asked.append(asked)
        return asked

    def served(self, text: str) -> Asked:
        """Send a prompt and return when it is answered."""
        asked = self.ask(text)
        assert asked.thread is not None
        asked.thread.join(60)
        assert asked.error is None
        return asked

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

    def _take(self, asked: Asked, max_tokens: int) -> None:
        try:
            asked.context, responses = self.generator.generate(asked.request, self.args(max_tokens))
            for response in responses:
                asked.n_tokens += 1
                asked.text += response.text
        except Exception as error:
            asked.error = error

    def decode(self) -> Asked:
        """Have a reply decode from now on."""
        asked = self.ask(synthetic_text(30, seed=99), ENDLESS)
        asked.go_on()
        return asked

    def forget_hot_blocks(self) -> None:
        # A reply's last part is sent before its turn is saved.
        wait_until(lambda: not self.generator._serving, "the end of all replies")
        self.store.drain()
        self.store.pool.clear()

    def close(self) -> None:
        for asked in self.asked:
            if asked.context is not None:
                asked.context.stop()
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
    """The reads of blocks: each does something first, on the thread that reads."""

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


def test_nobody_waits_for_what_another_needs_from_disk(server: Server, reads: Reads) -> None:
    prompt = synthetic_text(1200)
    first = server.served(prompt)
    server.forget_hot_blocks()
    reads.first = server.decode().go_on
    again = server.served(prompt)
    assert again.text == first.text
    assert again.outcome.tier == "disk" and again.outcome.n_restored >= 512
    assert len(reads.threads) >= 3 and set(reads.threads) == {"kvpersist-prefetch_0"}
    wait_until(lambda: n_pins(server.store) == 0, "written turns and no pins")
    # The line about the disk is logged once.
    assert server.served(prompt).outcome.tier == "ram"


def test_a_reply_that_runs_has_one_copy_of_its_caches_and_one_that_ended_none(
    server: Server,
) -> None:
    """Stock's loop holds the caches that it saved last."""

    def n_held() -> int:
        caches = (each for each in gc.get_objects() if isinstance(each, SequenceQuantizedKVCache))
        return sum(not cache.empty() for cache in caches) - n_before

    n_before = 0
    n_before = n_held()
    asked = server.decode()
    assert n_held() == 0  # the batch has caches of another class
    asked.context.stop()
    server.served(synthetic_text(1200))
    wait_until(lambda: not server.generator._serving, "the end of all replies")
    assert n_held() == 0


def test_replies_go_on_while_a_restore_is_joined(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two of their steps the restore takes a fifth of the longest stall, or one block."""
    prompt = synthetic_text(1500)
    first = server.served(prompt)
    server.forget_hot_blocks()
    add, put = Joiner.add, ReplyQueue.put
    n_items, added = 0, list[int]()

    def noted(*args: Any) -> None:
        nonlocal n_items
        n_items += 1
        put(*args)

    def slowly(*args: Any) -> None:
        added.append(n_items)
        time.sleep(0.15)
        add(*args)

    monkeypatch.setattr(ReplyQueue, "put", noted)
    monkeypatch.setattr(Joiner, "add", slowly)
    server.decode()
    again = server.served(prompt)
    assert again.text == first.text and again.outcome.tier == "disk"
    assert len(added) >= 4
    assert all(later > earlier for earlier, later in pairwise(added)), added


def test_replies_go_on_while_a_prompt_is_tokenized(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is done on the thread of its client, and once."""
    render, threads = type(server.generator)._render, []
    decoding = server.decode()

    def slowly(*args: Any) -> Any:
        threads.append(threading.current_thread())
        decoding.go_on()
        return render(*args)

    monkeypatch.setattr(type(server.generator), "_render", slowly)
    asked = server.served(synthetic_text(40, seed=7))
    assert threads == [asked.thread]


def test_a_prompt_is_looked_up_once_on_the_thread_of_its_client(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    find, threads = Lookup._find, list[threading.Thread]()

    def noted(*args: Any) -> Any:
        threads.append(threading.current_thread())
        return find(*args)

    monkeypatch.setattr(Lookup, "_find", noted)
    prompt = synthetic_text(400, seed=3)
    asked = []
    for _ in range(2):
        asked.append(server.served(prompt))
        server.forget_hot_blocks()  # a commit after the lookup would make it look again
    assert threads == [one.thread for one in asked]


def test_a_lookup_that_waits_for_a_disk_delays_other_lookups_for_a_limited_time(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has its own connection to the index. Other threads open theirs."""
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


def test_only_the_loaded_model_has_its_prompts_tokenized_ahead(server: Server) -> None:
    """And ids of a tokenizer whose model was unloaded are made again."""
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


def test_alone_it_is_restored_at_once(server: Server, reads: Reads) -> None:
    prompt = synthetic_text(1200)
    first = server.served(prompt)
    server.forget_hot_blocks()
    reads.first = lambda: wait_until(lambda: len(reads.threads) > 1, "several reads at once")
    again = server.served(prompt)
    assert again.text == first.text and again.outcome.tier == "disk"
    assert not any("prefetch" in name for name in reads.threads)


def test_others_pass_one_that_waits(server: Server, reads: Reads) -> None:
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


def test_the_writer_knows_of_the_replies_that_run(server: Server) -> None:
    writer = server.store.writer
    decoding = server.decode()
    server.served(synthetic_text(40))
    wait_until(lambda: writer._n_replies == 1, "a step of the reply")
    decoding.context.stop()
    wait_until(lambda: writer._n_replies == 0, "the end of serving")


def test_many_that_wait_are_all_served(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [synthetic_text(200, seed=seed) for seed in range(12)]
    first = [server.served(prompt).text for prompt in prompts]
    server.forget_hot_blocks()
    server.decode()
    again = [server.ask(prompt) for prompt in prompts]
    for asked in again:
        assert asked.thread is not None
        asked.thread.join(60)
    assert [asked.error for asked in again] == [None] * len(prompts)
    assert [asked.outcome.tier for asked in again] == ["disk"] * len(prompts)
    assert [asked.text for asked in again] == first
    wait_until(lambda: n_pins(server.store) == 0, "written turns and no pins")


def test_a_client_that_goes_away_while_it_waits_holds_nothing(server: Server, reads: Reads) -> None:
    """The server notices that only when it writes to the client; then the sequence is stopped."""
    prompt = synthetic_text(1200)
    server.served(prompt)
    server.forget_hot_blocks()
    decoding = server.decode()
    gone = server.ask(prompt, ENDLESS)
    reads.wait_for_begin()
    wait_until(lambda: gone.context is not None, "the one that waited")
    gone.context.stop()
    wait_until(lambda: n_pins(server.store) == 0, "letting go")
    decoding.go_on()


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("hurt", [damage, Path.unlink], ids=["damaged", "deleted"])
def test_what_cannot_be_read_costs_a_restore(
    server: Server, reads: Reads, hurt: Callable[[Path], None]
) -> None:
    prompt = synthetic_text(1200)
    first = server.served(prompt)
    server.forget_hot_blocks()
    root = RequestState.of(ClientRequest.of(first.request)).root
    assert root is not None
    (node,) = server.store.children(root.key)
    (second,) = server.store.children(node.key)
    server.decode()
    is_hurt = threading.Event()
    reads.first = partial(is_hurt.wait, 60)
    again = server.ask(prompt)
    reads.wait_for_begin()
    hurt(block_path(server.store.folder, second.key))
    is_hurt.set()
    assert again.thread is not None
    again.thread.join(60)
    assert again.error is None and again.text == first.text
    assert again.outcome.n_restored == 256
    wait_until(lambda: n_pins(server.store) == 0, "written turns and no pins")


def test_a_reader_that_fails_costs_a_restore(
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


def test_the_server_ends_while_it_reads_ahead(server: Server, reads: Reads) -> None:
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
