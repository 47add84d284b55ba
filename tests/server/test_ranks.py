"""Two processes compute one model, as with `mlx.launch`: they always agree and lose no turn."""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import cache
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from tests.support import (
    AT_ONCE,
    Message,
    ServerError,
    ServerProcess,
    make_tiny_model,
    make_zoo_model,
    synthetic_text,
    wait_until,
    whole_characters,
)
from tests.support.ranks import RankedServer
from tests.support.server_process import HOST, free_port

pytestmark = pytest.mark.slow

MODELS = {"tensor": "llama", "pipeline": "deepseek_v2", "hybrid": "qwen3_next"}
"""Names for test ids: how a model is divided, or that it has recurrent layers."""
ENDS_S = 30.0
"""The longest time to a reply or a broken connection if a rank fails."""


@pytest.fixture(scope="session")
def divided(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models that can be divided; a model for a pipeline needs an index of its files."""
    folder, made = tmp_path_factory.mktemp("divided"), {}
    made["tensor"] = make_tiny_model(folder / "llama", n_heads=4, n_kv_heads=2)
    for kind in ("pipeline", "hybrid"):
        made[kind] = path = make_zoo_model(folder / kind, MODELS[kind])
        with safe_open(path / "model.safetensors", "np") as weights:
            files = dict.fromkeys(weights.keys(), "model.safetensors")
        index = {"metadata": {}, "weight_map": files}
        (path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return made


class TwoRanks(RankedServer):
    """Two ranks with a store below `folder`."""

    def __init__(
        self, divided: dict[str, Path], kind: str, folder: Path, *extra: str, **more: Any
    ) -> None:
        pipeline = () if kind == "tensor" else ("--pipeline",)
        self.store = folder / "store"
        options = ("--plugin", "kvpersist", "--kvpersist-dir", str(self.store), *pipeline)
        more.setdefault("launcher", AT_ONCE)
        log_path = folder / "ranks.log"
        super().__init__(divided[kind], *options, *extra, log_path=log_path, **more)

    def __enter__(self) -> TwoRanks:
        super().__enter__()
        return self

    def folder(self, rank: int) -> Path:
        return self.store / f"rank-{rank}-of-2"


class Talk:
    """A conversation whose replies are known from a single process."""

    def __init__(self, model: Path, seed: int = 0) -> None:
        self.seed, self.bias = seed, whole_characters(model)
        self.messages: list[Message] = []
        if seed:  # conversations with a seed share a system prompt long enough to wait for
            self.messages.append({"role": "system", "content": synthetic_text(900, seed=99)})
        self.replies: list[str] = []
        self.cached: list[int] = []
        self.total = 0

    def turn(self, server: ServerProcess) -> None:
        n = len(self.replies)
        text = synthetic_text(120, seed=1000 * self.seed + n)
        self.messages.append({"role": "user", "content": text})
        reply = server.chat(
            self.messages,
            f"talk {self.seed}",
            max_tokens=24,
            temperature=0.0,
            logit_bias=self.bias,
        )
        self.messages.append({"role": "assistant", "content": reply.text})
        self.replies.append(reply.text)
        self.cached.append(reply.cached_tokens)
        self.before, self.total = self.total, reply.prompt_tokens + reply.completion_tokens

    @property
    def n_computed_again(self) -> int:
        """The number of tokens of the previous turn that the last turn did not reuse."""
        return self.before - self.cached[-1]


EXACT = ("--kvpersist-kv-bits", "16")


@cache
def single_process_replies(
    model: Path, n_turns: int, seeds: tuple[int, ...] = (0,)
) -> list[list[str]]:
    """Return one process's replies to conversations of `n_turns` turns."""
    talks = [Talk(model, seed) for seed in seeds]
    with (
        tempfile.TemporaryDirectory() as store,
        ServerProcess(model, "--plugin", "kvpersist", "--kvpersist-dir", store, *EXACT) as server,
    ):
        for _ in range(n_turns):
            for talk in talks:
                talk.turn(server)
    return [talk.replies for talk in talks]


def reply_to(model: Path, messages: list[Message]) -> str:
    """Return the reply of a process that has nothing stored."""
    with (
        tempfile.TemporaryDirectory() as store,
        ServerProcess(model, "--plugin", "kvpersist", "--kvpersist-dir", store, *EXACT) as server,
    ):
        bias = whole_characters(model)
        reply = server.chat(messages, max_tokens=24, temperature=0.0, logit_bias=bias)
    return reply.text


def wait_until_written(server: RankedServer) -> None:
    def is_idle() -> bool:
        stats = json.loads(server.request("GET", "/v1/kvpersist/stats")[2])
        return bool(stats["store"]["queue"]["tasks"] == 0)

    wait_until(is_idle, "nothing left to write", 60)
    time.sleep(1.0)  # rank 1 has no HTTP


@pytest.mark.parametrize("kind", MODELS)
def test_conversation_continues_after_all_ranks_are_killed(
    divided: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    (expected,) = single_process_replies(divided[kind], 5)
    talk = Talk(divided[kind])
    with TwoRanks(divided, kind, tmp_path, *EXACT) as server:
        for n in range(5):
            if n in (2, 3):
                wait_until_written(server)
                server.kill_all()
                server.start()
            talk.turn(server)
            assert n == 0 or talk.n_computed_again <= 2, server.log
    assert talk.replies == expected


@pytest.mark.parametrize("kind", MODELS)
def test_quantized_replies_equal_those_of_one_process(
    divided: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    both = []
    for server in (
        ServerProcess(
            divided[kind], "--plugin", "kvpersist", "--kvpersist-dir", str(tmp_path / "one")
        ),
        TwoRanks(divided, kind, tmp_path),
    ):
        talk = Talk(divided[kind])
        with server:
            for _ in range(4):
                talk.turn(server)
        both.append(talk.replies)
    assert both[0] == both[1]


def test_four_concurrent_clients_get_the_replies_of_one_process(
    divided: dict[str, Path], tmp_path: Path
) -> None:
    model, seeds = divided["tensor"], (1, 2, 3, 4)
    expected = single_process_replies(model, 4, seeds)
    talks = [Talk(model, seed) for seed in seeds]
    with TwoRanks(divided, "tensor", tmp_path, *EXACT) as server:

        def run(talk: Talk) -> None:
            for _ in range(4):
                talk.turn(server)

        threads = [threading.Thread(target=run, args=(talk,)) for talk in talks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [talk.replies for talk in talks] == expected
    assert all(cached > 0 for talk in talks for cached in talk.cached[1:])


def flip_bits(folder: Path) -> None:
    for path in (folder / "blocks").rglob("*.safetensors"):
        data = bytearray(path.read_bytes())
        data[-len(data) // 3] ^= 0x10
        path.write_bytes(data)


def empty(folder: Path) -> None:
    shutil.rmtree(folder)


@pytest.mark.parametrize("kind", ["tensor", "pipeline"])
@pytest.mark.parametrize("harm", [flip_bits, empty])
@pytest.mark.parametrize("rank", [0, 1])
def test_blocks_lost_on_one_rank_cost_only_reuse(
    divided: dict[str, Path], tmp_path: Path, kind: str, rank: int, harm: Callable[[Path], None]
) -> None:
    (expected,) = single_process_replies(divided[kind], 4)
    talk = Talk(divided[kind])
    with TwoRanks(divided, kind, tmp_path, *EXACT) as server:
        for _ in range(2):
            talk.turn(server)
        wait_until_written(server)
        server.kill_all()
        harm(server.folder(rank))
        server.start()
        talk.turn(server)
        assert talk.cached[-1] == 0
        messages = talk.messages[:-1]
        talk.turn(server)
        assert talk.n_computed_again <= 2
    if (rank, harm) == (0, empty):  # the deleted folder had the ids of the replies
        expected = [*expected[:2], reply_to(divided[kind], messages)]
    assert talk.replies[: len(expected)] == expected


def test_ranks_reuse_only_blocks_that_both_have(divided: dict[str, Path], tmp_path: Path) -> None:
    """Rank 1 goes back to an older state of its folder: the common blocks are reused."""
    (expected,) = single_process_replies(divided["tensor"], 4)
    talk, older = Talk(divided["tensor"]), tmp_path / "older"
    with TwoRanks(divided, "tensor", tmp_path, *EXACT) as server:
        for n in range(3):
            talk.turn(server)
            wait_until_written(server)
            if n == 1:
                server.kill_all()
                shutil.copytree(server.folder(1), older)
                had = talk.total
                server.start()
        server.kill_all()
        shutil.rmtree(server.folder(1))
        older.rename(server.folder(1))
        server.start()
        talk.turn(server)
    assert talk.replies == expected
    assert 0 < talk.cached[-1] <= had
    assert "another rank has stored less of the prompt" in server.log


def test_full_disk_of_one_rank_costs_only_reuse(divided: dict[str, Path], tmp_path: Path) -> None:
    (expected,) = single_process_replies(divided["tensor"], 3)
    talk = Talk(divided["tensor"])
    full = ("--kvpersist-min-free", "900T")
    with TwoRanks(divided, "tensor", tmp_path, *EXACT, others_extra=full) as server:
        for _ in range(2):
            talk.turn(server)
        server.kill_all()
        server.start()
        talk.turn(server)
    assert talk.replies == expected
    assert talk.cached[1] > 0 and talk.cached[2] == 0


def leave(server: ServerProcess, body: dict[str, object], after_s: float) -> None:
    """Send a request, and disconnect after `after_s`."""
    connection = HTTPConnection(HOST, server.port, timeout=ENDS_S)
    connection.request("POST", "/v1/chat/completions", json.dumps(body))
    time.sleep(after_s)
    connection.close()


@pytest.mark.parametrize("seed", [None, 7], ids=["in a batch", "alone"])
def test_ranks_keep_serving_after_disconnects(
    divided: dict[str, Path], tmp_path: Path, seed: int | None
) -> None:
    """If a client with a seed disconnects, stock's ranks wait forever."""
    rng, talk = random.Random(3), Talk(divided["tensor"])
    with TwoRanks(divided, "tensor", tmp_path) as server:
        for n in range(6):
            text = synthetic_text(12_000 if n % 2 else 100, seed=n)
            messages = [{"role": "user", "content": text}]
            body = {"messages": messages, "max_tokens": 4000, "stream": bool(n % 3), "seed": seed}
            leave(server, body, rng.uniform(0.05, 1.5))
            if n % 2:
                talk.turn(server)
        assert server.chat([{"role": "user", "content": "Hi"}], max_tokens=3, seed=seed).text
        assert server.others[0].poll() is None


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("rank", [0, 1])
def test_end_of_one_rank_ends_both(
    divided: dict[str, Path], tmp_path: Path, rank: int, number: signal.Signals
) -> None:
    with TwoRanks(divided, "tensor", tmp_path) as server:
        process_id = server.pid if rank == 0 else server.others[0].pid
        os.kill(process_id, number)
        statuses = [server.wait(ENDS_S), *server.wait_for_others(ENDS_S)]
    if number == signal.SIGTERM:
        assert statuses == [0, 0], server.log
    else:
        assert statuses[1 - rank] == 1
        assert "has ended" in server.log


def test_ranks_end_with_mlx_launch(divided: dict[str, Path], tmp_path: Path) -> None:
    """If SIGTERM ends MLX's launcher, stock's ranks keep running."""
    port, log_path = free_port(), tmp_path / "log"
    command = (
        *(sys.executable, "-c", "from mlx._distributed_utils.launch import main; main()"),
        *("-n", "2", "--backend", "ring", "--starting-port", str(free_port()), "--"),
        *(sys.executable, "-m", "mlx_lm", "server", "--model", str(divided["tensor"])),
        *("--port", str(port), "--plugin", "kvpersist", "--kvpersist-dir", str(tmp_path / "store")),
    )
    with log_path.open("wb") as log:
        launcher = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT
        )
    marker = str(tmp_path / "store")

    def n_ranks() -> int:
        processes = subprocess.run(["pgrep", "-f", f"mlx_lm server.*{marker}"], capture_output=True)
        return len(processes.stdout.split()) - (launcher.poll() is None)

    def is_healthy() -> bool:
        connection = HTTPConnection(HOST, port, timeout=2)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except (OSError, HTTPException):
            return False

    try:
        wait_until(is_healthy, "a healthy server", 60)
        assert n_ranks() == 2
    finally:
        launcher.terminate()
        launcher.communicate(timeout=ENDS_S)
    wait_until(lambda: n_ranks() == 0, "no rank left", ENDS_S)


@pytest.fixture(scope="module")
def begun(divided: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Talk, Path]:
    """A conversation of one turn, and the folder of the two ranks that have stored it."""
    folder, talk = tmp_path_factory.mktemp("begun"), Talk(divided["tensor"])
    with TwoRanks(divided, "tensor", folder, *EXACT) as server:
        talk.turn(server)
        wait_until_written(server)
    return talk, folder / "store"


FAULTS = (
    "mlx_lm_kvpersist.request.lookup:Lookup._find",
    "mlx_lm_kvpersist.request.lookup:Lookup._point",
    "mlx_lm_kvpersist.request.lookup:Lookup._joined",
    "mlx_lm_kvpersist.request.lookup:Lookup._outcome",
    "mlx_lm_kvpersist.request.lookup:canary_difference",
    "mlx_lm_kvpersist.request.model:LoadedModel.save",
    "mlx_lm_kvpersist.request.serving:ServedRequest.__init__",
    "mlx_lm_kvpersist.request.serving:ServedRequest.advance",
    "mlx_lm_kvpersist.request.serving:ServedRequest.enter",
    "mlx_lm_kvpersist.request.serving:ServedRequest.insert",
    "mlx_lm_kvpersist.request.memory:Memory.weigh",
    "mlx_lm_kvpersist.request.memory:Memory.enters",
    "mlx_lm_kvpersist.request.model:spec_of",
    "mlx_lm_kvpersist.store.block_store:BlockStore.commit",
    "mlx_lm_kvpersist.store.block_store:BlockStore.touch",
    "mlx_lm_kvpersist.host.scheduling.model_provider:PluginCaches.merge",
    "mlx_lm_kvpersist.host.scheduling.prefill:Prefills.compute",
    "mlx_lm_kvpersist.host.scheduling.prefill:Prefills._chunk",
    "mlx_lm_kvpersist.host.scheduling.batch_generator:PluginBatchGenerator._admit",
    "mlx_lm_kvpersist.host.scheduling.batch_generator:PluginBatchGenerator._decode",
    "mlx_lm_kvpersist.plugin:KVPersistPlugin._record",
    "mlx_lm_kvpersist.plugin:KVPersistPlugin.take_request",
    "mlx_lm_kvpersist.plugin:KVPersistPlugin.idle",
)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("target", FAULTS, ids=lambda target: target.rpartition(":")[2])
def test_fault_on_one_rank_ends_in_a_reply_or_an_exit(
    divided: dict[str, Path], begun: tuple[Talk, Path], tmp_path: Path, target: str, rank: int
) -> None:
    launcher = ("-m", "tests.support.faulty", target, "2", str(rank))
    (expected,) = single_process_replies(divided["tensor"], 3)
    talk, store = copy.deepcopy(begun[0]), begun[1]
    shutil.copytree(store, tmp_path / "store")
    options = {"launcher": launcher, "request_timeout_s": ENDS_S, "start_timeout_s": ENDS_S}
    server = TwoRanks(divided, "tensor", tmp_path, *EXACT, **options)
    try:
        with server:
            for _ in range(2):
                talk.turn(server)
    except (ServerError, HTTPException, OSError) as error:
        assert not isinstance(error, TimeoutError) and "no healthy" not in str(error), server.log
    for n, reply in enumerate(talk.replies):
        if reply != expected[n]:  # an earlier reply was read as rendered text
            assert reply == reply_to(divided["tensor"], talk.messages[: 2 * n + 1]), server.log
            break


KILLS_S = 600.0
"""The time during which ranks are killed at random."""


@pytest.mark.timeout(KILLS_S + 300)
def test_random_kills_of_ranks_change_no_reply(divided: dict[str, Path], tmp_path: Path) -> None:
    """One rank or both are killed at any moment; more than half of the prompt tokens are reused."""
    rng = random.Random(20)
    texts = [[synthetic_text(100 + 80 * n, seed=seed) for n in range(8)] for seed in range(4)]
    prompts = [text for growing in texts for text in growing]
    with ServerProcess(divided["tensor"]) as single:
        expected = {
            text: single.complete(text, max_tokens=12, temperature=0.0).text for text in prompts
        }
    n_replies = n_kills = n_cached = n_prompt = 0
    until_s = time.monotonic() + KILLS_S
    server = TwoRanks(divided, "tensor", tmp_path, *EXACT, request_timeout_s=ENDS_S)
    with server:
        while time.monotonic() < until_s:
            killed = rng.choice([None, None, "rank 0", "rank 1", "all"])
            killer = threading.Timer(rng.uniform(0, 0.8), kill_some, (server, killed))
            killer.start()
            try:
                for text in rng.choice(texts):
                    reply = server.complete(text, max_tokens=12, temperature=0.0)
                    assert reply.text == expected[text], server.log
                    n_replies += 1
                    n_cached, n_prompt = (
                        n_cached + reply.cached_tokens,
                        n_prompt + reply.prompt_tokens,
                    )
            except (ServerError, HTTPException, OSError) as error:
                assert killed and not isinstance(error, TimeoutError), server.log
            killer.join()
            if killed:
                n_kills += 1
                server.wait(ENDS_S)
                server.wait_for_others(ENDS_S)
                server.start()
    assert n_replies > 50 and n_kills > 10
    assert n_cached > n_prompt / 2


def kill_some(server: TwoRanks, target: str | None) -> None:
    if target in ("rank 0", "all"):
        os.kill(server.pid, signal.SIGKILL)
    if target in ("rank 1", "all"):
        server.others[0].kill()
