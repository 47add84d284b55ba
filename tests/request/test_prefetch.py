"""Reading ahead, behind the server's own generation thread: who waits, and for what."""

from __future__ import annotations

import argparse
import copy
import importlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mlx_lm_kvpersist.cache.blocks.cut_join import Joiner
from mlx_lm_kvpersist.host import manager
from mlx_lm_kvpersist.host.hooks import ClientRequest, Prompt
from mlx_lm_kvpersist.host.patching.patches import PATCH_SET, PATCHES
from mlx_lm_kvpersist.host.patching.probes import ARGS
from mlx_lm_kvpersist.plugin import KVPersistPlugin
from mlx_lm_kvpersist.request import lookup
from mlx_lm_kvpersist.request.lookup import Lookup
from mlx_lm_kvpersist.request.outcome import Outcome
from mlx_lm_kvpersist.request.state import RequestState
from mlx_lm_kvpersist.store.block_store import BlockStore
from tests.support import UNMEASURED, synthetic_text, wait_until
from tests.support.store_files import block_path

READ_S = 0.3
"""What reading one block takes in these tests: decoding goes on in less."""
ENDLESS = 100_000


@dataclass
class Asked:
    """A request and what came of it so far."""

    request: Any
    text: str = ""
    times: list[float] = field(default_factory=list)
    error: Exception | None = None
    context: Any = None
    thread: threading.Thread | None = None

    @property
    def outcome(self) -> Outcome:
        outcome = RequestState.of(ClientRequest.of(self.request)).outcome
        assert outcome is not None
        return outcome

    def longest_gap_s(self, start: float, stop: float) -> float:
        times = [start, *(at for at in self.times if start < at < stop), stop]
        return max(b - a for a, b in pairwise(times))


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
                asked.times.append(time.monotonic())
                asked.text += response.text
        except Exception as error:
            asked.error = error

    def decode(self) -> Asked:
        """Have somebody decode from now on."""
        asked = self.ask(synthetic_text(30, seed=99), ENDLESS)
        wait_until(lambda: len(asked.times) > 3, "tokens of the one who decodes")
        return asked

    def forget_hot_blocks(self) -> None:
        # A reply's last part is sent before its turn is kept.
        wait_until(lambda: not self.generator._serving, "the end of all replies")
        self.store.drain()
        self.store.pool.clear()

    def close(self) -> None:
        for asked in self.asked:
            if asked.context is not None:
                asked.context.stop()
        self.generator.stop_and_join()


def knows_its_model(plugin: KVPersistPlugin) -> bool:
    return plugin._serving is not None


@pytest.fixture
def server(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(lookup, "MIN_PREFETCH_BYTES", 0)
    plugin = KVPersistPlugin()
    parser = argparse.ArgumentParser()
    plugin.add_options(parser)
    options = ["--kvpersist-dir", str(tmp_path / "store"), *UNMEASURED]
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
                wait_until(lambda: knows_its_model(plugin), "what the model needs")
                yield made
            finally:
                made.close()
    finally:
        PATCH_SET.undo()
        plugin.shutdown()


@pytest.fixture
def slow_reads(server: Server, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Make each read take READ_S; return the names of the threads that read."""
    threads: list[str] = []
    read = server.store.reader.read

    def slowly(*args: Any, **named: Any) -> Any:
        threads.append(threading.current_thread().name)
        time.sleep(READ_S)
        return read(*args, **named)

    monkeypatch.setattr(server.store.reader, "read", slowly)
    return threads


def n_pins(store: BlockStore) -> int:
    return sum(entry.prefetched for entry in store.pool._entries.values())


def test_nobody_waits_for_what_another_needs_from_disk(
    server: Server, slow_reads: list[str]
) -> None:
    prompt = synthetic_text(1200)
    first = server.served(prompt)
    server.forget_hot_blocks()
    decoding = server.decode()
    started = time.monotonic()
    again = server.served(prompt)
    assert again.text == first.text
    assert again.outcome.tier == "disk" and again.outcome.n_restored >= 512
    assert len(slow_reads) >= 3 and set(slow_reads) == {"kvpersist-prefetch_0"}
    assert decoding.longest_gap_s(started, started + READ_S * len(slow_reads)) < READ_S
    wait_until(lambda: n_pins(server.store) == 0, "turns to be written and nothing held")
    # What it says of disk is said once.
    assert server.served(prompt).outcome.tier == "ram"


def test_replies_go_on_while_a_restore_is_joined(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between two of their steps it takes a fifth of the longest stall, or one block."""
    prompt = synthetic_text(1500)
    first = server.served(prompt)
    server.forget_hot_blocks()
    add, block_s = Joiner.add, 0.15
    added: list[float] = []

    def slowly(*args: Any) -> None:
        added.append(time.monotonic())
        time.sleep(block_s)
        add(*args)

    monkeypatch.setattr(Joiner, "add", slowly)
    decoding = server.decode()
    again = server.served(prompt)
    assert again.text == first.text and again.outcome.tier == "disk"
    assert len(added) >= 4
    assert decoding.longest_gap_s(added[0], added[-1] + block_s) < 2 * block_s


def test_replies_go_on_while_a_prompt_is_tokenized(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is done on the thread of its client, and once."""
    render, threads = type(server.generator)._render, []

    def slowly(*args: Any) -> Any:
        threads.append(threading.current_thread())
        time.sleep(READ_S)
        return render(*args)

    decoding = server.decode()
    monkeypatch.setattr(type(server.generator), "_render", slowly)
    started = time.monotonic()
    asked = server.served(synthetic_text(40, seed=7))
    assert threads == [asked.thread]
    assert decoding.longest_gap_s(started, started + READ_S) < READ_S / 2


def test_a_prompt_is_looked_up_once_and_not_on_the_generation_thread(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    find, threads = Lookup._find, []

    def noted(*args: Any) -> Any:
        threads.append(threading.current_thread().name)
        return find(*args)

    monkeypatch.setattr(Lookup, "_find", noted)
    prompt = synthetic_text(400, seed=3)
    for _ in range(2):
        server.served(prompt)
        server.forget_hot_blocks()  # a commit after the lookup would make it look again
    assert len(threads) == 2
    assert not any("_run_generate" in name for name in threads)


def test_only_the_loaded_model_has_its_prompts_tokenized_ahead(server: Server) -> None:
    """And what was made with the tokenizer of a model that went meanwhile is made again."""
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


def test_alone_it_is_restored_at_once(server: Server, slow_reads: list[str]) -> None:
    prompt = synthetic_text(1200)
    first = server.served(prompt)
    server.forget_hot_blocks()
    again = server.served(prompt)
    assert again.text == first.text and again.outcome.tier == "disk"
    assert not any("ahead" in name for name in slow_reads)
    # Several at once.
    assert again.outcome.restore_ms < 1e3 * READ_S * len(slow_reads)


def test_others_pass_one_that_waits(server: Server, slow_reads: list[str]) -> None:
    prompt = synthetic_text(1200)
    server.served(prompt)
    server.forget_hot_blocks()
    server.decode()
    waiting = server.ask(prompt)
    wait_until(lambda: bool(slow_reads), "reading ahead")
    short = server.served(synthetic_text(40, seed=5))
    assert short.times and not waiting.times
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
    wait_until(lambda: n_pins(server.store) == 0, "turns to be written and nothing held")


def test_a_client_that_goes_away_while_it_waits_holds_nothing(
    server: Server, slow_reads: list[str]
) -> None:
    """The server sees it only when it writes to it; then the sequence is stopped."""
    prompt = synthetic_text(1200)
    server.served(prompt)
    server.forget_hot_blocks()
    decoding = server.decode()
    gone = server.ask(prompt, ENDLESS)
    wait_until(lambda: bool(slow_reads), "reading ahead")
    wait_until(lambda: gone.context is not None, "the one that waited")
    gone.context.stop()
    wait_until(lambda: n_pins(server.store) == 0, "letting go")
    n_before = len(decoding.times)
    wait_until(lambda: len(decoding.times) > n_before + 3, "tokens of the one who decodes")


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("hurt", [damage, Path.unlink], ids=["damaged", "deleted"])
def test_what_cannot_be_read_costs_a_restore(
    server: Server, slow_reads: list[str], hurt: Callable[[Path], None]
) -> None:
    prompt = synthetic_text(1200)
    first = server.served(prompt)
    server.forget_hot_blocks()
    root = RequestState.of(ClientRequest.of(first.request)).root
    assert root is not None
    (node,) = server.store.children(root.key)
    (second,) = server.store.children(node.key)
    server.decode()
    again = server.ask(prompt)
    wait_until(lambda: bool(slow_reads), "reading ahead")
    hurt(block_path(server.store.folder, second.key))
    assert again.thread is not None
    again.thread.join(60)
    assert again.error is None and again.text == first.text
    assert again.outcome.n_restored == 256
    wait_until(lambda: n_pins(server.store) == 0, "turns to be written and nothing held")


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


def test_the_server_ends_while_it_reads_ahead(server: Server, slow_reads: list[str]) -> None:
    prompt = synthetic_text(1200)
    server.served(prompt)
    server.forget_hot_blocks()
    decoding = server.decode()
    server.ask(prompt)
    wait_until(lambda: bool(slow_reads), "reading ahead")
    started = time.monotonic()
    decoding.context.stop()
    server.generator.stop_and_join()
    server.plugin.shutdown()
    assert time.monotonic() - started < 10 * READ_S
