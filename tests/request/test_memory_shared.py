"""Sequences of a real batch share an account: they stay within it, and replies do not change."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Queue
from types import ModuleType, SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest

from mlx_lm_kvpersist.cache.geometry.kinds import end_on_grid
from mlx_lm_kvpersist.cache.geometry.precision import PrecisionChoice
from mlx_lm_kvpersist.cache.geometry.spec import probe_model
from mlx_lm_kvpersist.cache.live.caches import batch_of
from mlx_lm_kvpersist.cache.measuring.prefill_memory import PrefillMemory
from mlx_lm_kvpersist.errors import RequestRefused
from mlx_lm_kvpersist.host.hooks import REPLY, ClientRequest, ModelSupport, Prompt
from mlx_lm_kvpersist.host.manager import Taken, TakenTokens
from mlx_lm_kvpersist.host.scheduling.model_provider import PluginCaches
from mlx_lm_kvpersist.host.scheduling.waiting import ReplyQueue
from mlx_lm_kvpersist.request import memory as accounts
from mlx_lm_kvpersist.request.memory import Memory
from mlx_lm_kvpersist.request.model import LoadedModel, Speed
from mlx_lm_kvpersist.request.serving import RequestState, ServedRequest, Serving, Stage
from mlx_lm_kvpersist.store.block_store import BlockStore, StoreLimits
from models_check.build import build
from models_check.configs import CONFIGS

N_PROMPT, N_REPLY = 440, 90  # 24 tokens more need a larger capacity (see `capacity`)
MIB = 1 << 20

FORGOTTEN_PEAKS: list[int] = []
"""Earlier peaks of this step: each chunk of a prompt resets MLX's counter."""


@dataclass(eq=False)
class Client:
    """One request and its reply so far."""

    request: ServedRequest
    taken: Taken
    state: RequestState
    answer: list[int] = field(default_factory=list)


class Server:
    """The server's loop with one store; `memory` is the account."""

    def __init__(self, server: ModuleType, family: str, folder: Path, n_fit: int) -> None:
        model: Any = build(family)
        spec = probe_model(model, PrecisionChoice())
        end_on_grid(model)
        # A step's memory besides the caches is not learned: for tiny models it is the largest part.
        speed = Speed(replace(PrefillMemory.of(model, spec, MIB), most_factor=1.0))
        self.store = BlockStore(folder, StoreLimits(1 << 30, 1 << 30))
        loaded = LoadedModel(model, None, spec, "fingerprint", None, speed=speed)
        self.memory = Memory(1 << 40, 0, self.store, loaded)
        self.serving = Serving(self.store, loaded, lambda *_: None, False, 10.0, self.memory)
        if n_fit:
            lengths, more = [N_PROMPT] * n_fit, accounts.MORE + accounts.GROWTH
            needed = self.memory._takes.caches_bytes((), lengths, more)
            needed += self.memory._takes.step_bytes((), lengths, more)
            self.memory.total_bytes = needed * 8 // 7 + 8
            self.memory.changed()
        limits = speed.limits(1.0)
        support = ModelSupport(spec.make_cache, batch_of, limits=limits, weigh=self.memory.weigh)
        model.make_cache = PluginCaches(model, "kvpersist", support)
        stream = mx.default_stream(mx.default_device())
        self.generator = server.BatchGenerator(model, stream=stream)
        self.block_bytes = 256 * spec.bytes_per_token + spec.bytes_per_checkpoint
        self.most_bytes = self.n_parked = self.most_running = self.peak_besides_caches = 0
        gc.collect()
        self._before = mx.get_active_memory()

    def client(self, number: int, ids: list[int]) -> Client:
        sent = ClientRequest(SimpleNamespace(request_type="text", prompt="", messages=[]))
        request = ServedRequest(self.serving, sent, Prompt(ids, [ids], ["user"]))
        taken = Taken("kvpersist", request)
        taken.reply = ReplyQueue(Queue(), sent)
        return Client(request, taken, RequestState.of(sent))

    def run(self, prompts: list[list[int]], *, has_pressure: bool = False) -> list[list[int]]:
        """Serve all prompts at once; return the replies. `has_pressure`: memory then gets short."""
        clients = [self.client(number, ids) for number, ids in enumerate(prompts)]
        waiting, running = list(clients), dict[int, Client]()
        while waiting or running:
            for client in list(waiting):
                if not running or client.taken.advance():
                    waiting.remove(client)
                    running[self._enter(client)] = client
            self._step(running)
            if has_pressure and any(len(client.answer) == 10 for client in clients):
                self.memory._pressure_level = lambda: 4
            self.n_parked = max(self.n_parked, len(self.generator.parked))
            self.most_running = max(self.most_running, len(running))
            self._weigh()
        self.memory.weigh((), (), 0)
        self.store.drain()
        return [client.answer for client in clients]

    def _enter(self, client: Client) -> int:
        prompt = client.taken.enter()
        assert prompt is not None
        n_cached, caches = client.taken.n_cached, client.taken.caches
        client.taken.caches = None
        tokens = TakenTokens(prompt.ids, client.taken)
        (uid,) = self.generator.insert_segments(
            segments=[[list(prompt.ids[n_cached:])]],
            max_tokens=[N_REPLY],
            caches=[None if caches is None else list(caches)],
            all_tokens=[tokens[:n_cached]],
        )
        return int(uid)

    def _step(self, running: dict[int, Client]) -> None:
        mx.reset_peak_memory()
        FORGOTTEN_PEAKS.clear()
        # Stock also keeps the responses for a step.
        prompts, replies = self._responses = self.generator.next()
        ended = [
            response.uid
            for response in prompts
            if response.end_of_segment and not response.end_of_prompt
        ]
        for caches, tokens in self.generator.extract_cache(ended).values():
            tokens.taken.insert(tokens, caches, "user")
        for response in replies:
            client = running[response.uid]
            client.answer.append(response.token)
            if response.finish_reason is not None:
                client.taken.insert(response.all_tokens, response.prompt_cache, REPLY)
                client.state.move(Stage.DONE)
                del running[response.uid]
        known = self._before + self.generator.prompt_cache_nbytes + self.store.pool.n_bytes
        peak_bytes = max([mx.get_peak_memory(), *FORGOTTEN_PEAKS])
        self.peak_besides_caches = max(self.peak_besides_caches, peak_bytes - known)

    def _weigh(self) -> None:
        parts = self.memory.parts()
        live = self.generator.prompt_cache_nbytes
        used = live + sum(parts[part] for part in ("restored", "pool", "records"))
        self.most_bytes = max(self.most_bytes, used)

    def close(self) -> None:
        self.generator.close()
        self.memory.close()  # restores MLX's memory limit for later tests
        self.store.close()


@pytest.fixture
def serve(
    patched_server: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Server]]:
    monkeypatch.setattr(accounts, "_INDEX_BYTES", 0)
    monkeypatch.setattr(accounts, "_RECORD_BYTES", 0)
    monkeypatch.setattr(accounts, "GROWTH", 8)
    forget = mx.reset_peak_memory

    def note_peak() -> None:
        FORGOTTEN_PEAKS.append(mx.get_peak_memory())
        forget()

    monkeypatch.setattr(mx, "reset_peak_memory", note_peak)
    monkeypatch.setattr(
        "mlx_lm_kvpersist.host.scheduling.batch_generator.WEIGH_EVERY", 8, raising=True
    )
    made: list[Server] = []

    def start(family: str, name: str, n_fit: int = 0) -> Server:
        made.append(Server(patched_server, family, tmp_path / name, n_fit))
        return made[-1]

    yield start
    for server in reversed(made):
        server.close()


def prompts(n_sessions: int, n_vocabulary: int = 200) -> list[list[int]]:
    return [
        [(7 * n * n + 13 * i + i * i * (n + 3)) % n_vocabulary for i in range(N_PROMPT - n % 5)]
        for n in range(n_sessions)
    ]


@pytest.mark.parametrize(
    ("family", "n_sessions", "n_fill", "n_reply"),
    [
        ("llama", 4, 2, 24),
        *(
            pytest.param(family, 12, 5, 90, marks=pytest.mark.slow)
            for family in ("llama", "gemma3_text", "qwen3_next")
        ),
    ],
)
def test_many_sessions_share_memory_that_fits_only_a_few(
    serve: Callable[..., Server],
    family: str,
    n_sessions: int,
    n_fill: int,
    n_reply: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Replies outgrow the memory and are parked; then each session has another turn."""
    monkeypatch.setattr("tests.request.test_memory_shared.N_REPLY", n_reply)
    turn_prompts = prompts(n_sessions)
    alone = serve(family, "alone")
    expected = [alone.run([ids])[0] for ids in turn_prompts]
    together = serve(family, "together", n_fill)
    for turn in range(2):
        if turn:
            turn_prompts = [
                [*ids, *reply, 5, 6, 7] for ids, reply in zip(turn_prompts, expected, strict=True)
            ]
            expected = [alone.run([ids])[0] for ids in turn_prompts]
            together.close()
            together = serve(family, "together", n_fill)
        assert together.run(turn_prompts, has_pressure=family == "gemma3_text") == expected
        assert turn or (together.n_parked > 0 and together.most_running >= n_fill)
        assert together.most_bytes <= together.memory.total_bytes + together.block_bytes


def test_a_changed_batch_is_copied_a_few_layers_at_a_time(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Besides the caches, a step takes the memory of some of their layers, never of all."""
    large = {"num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8}
    monkeypatch.setitem(CONFIGS, "llama", {**CONFIGS["llama"], **large, "head_dim": 64})
    monkeypatch.setattr("tests.request.test_memory_shared.N_REPLY", 12)
    server = serve("llama", "together", 20)
    server.run([ids[: 40 + 60 * number] for number, ids in enumerate(prompts(4))])
    caches = server.memory._takes.caches_bytes([300] * 4, ())
    assert server.peak_besides_caches < caches * 4 // 5


@pytest.mark.slow
def test_a_very_long_prompt_and_twenty_short_prompts_are_served(
    serve: Callable[..., Server],
) -> None:
    short = prompts(20)
    long = [(i * i + 3 * i) % 200 for i in range(6_000)]
    alone = serve("llama", "alone")
    all_prompts = [*short[:10], long, *short[10:]]
    expected = [alone.run([ids])[0] for ids in all_prompts]
    together = serve("llama", "together", 5)
    assert together.run(all_prompts) == expected
    assert not together.memory.waiting and not together.generator.parked


def test_no_reply_is_parked_while_memory_is_free(
    serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.request.test_memory_shared.N_REPLY", 24)
    together = serve("llama", "together", 20)
    together.run(prompts(6))
    assert together.n_parked == 0 and together.most_running == 6


def test_a_request_that_would_wait_is_refused_if_configured(
    serve: Callable[..., Server],
) -> None:
    server = serve("llama", "together", 2)
    server.memory.refuses = True
    running: dict[int, Client] = {}
    clients = [server.client(number, ids) for number, ids in enumerate(prompts(6))]
    with pytest.raises(RequestRefused, match="no memory is free") as refused:
        for client in clients:
            assert client.request.advance()
            running[server._enter(client)] = client
    assert refused.value.status == 503 and len(running) >= 2 and not server.memory.waiting
    while running:
        server._step(running)
    server.store.drain()
    server.memory.idle()
    again = server.client(9, prompts(10)[9])
    assert again.request.advance() and server._enter(again) is not None
