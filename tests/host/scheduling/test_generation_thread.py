"""If the generation thread ends, the server ends: clients get errors, turns are written."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from queue import Queue
from types import ModuleType, SimpleNamespace
from typing import Any
from weakref import WeakSet

import pytest

from mlx_lm_kvpersist.errors import GenerationStopped
from mlx_lm_kvpersist.host.patching.probes import ARGS
from mlx_lm_kvpersist.host.scheduling.response_generator import RequestQueue
from tests.support import ServerProcess, wait_until
from tests.support.host import Environment

USER = [{"role": "user", "content": "Hello?"}]
CHAT = "/v1/chat/completions"
LONG = {"messages": USER, "max_tokens": 100_000}


class InThread(threading.Thread):
    """Runs a function in a thread and keeps what it returned."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self.function = function
        self.result: Any = None
        self.start()

    def run(self) -> None:
        self.result = self.function()


def test_a_dead_generation_thread_ends_the_server(
    environment: Environment, tiny_model: Path, tmp_path: Path
) -> None:
    record = tmp_path / "calls.json"
    with ServerProcess(
        tiny_model,
        *("--plugin", "echo", "--echo-file", str(record), "--plugin", "failing"),
        python=str(environment.python),
        log_path=tmp_path / "server.log",
        env={"FAIL_IN": "generation"},
    ) as server:
        events = server.events(CHAT, {**LONG, "stream": True})
        next(events)
        streamed = InThread(lambda: list(events))
        whole = InThread(lambda: server.request("POST", CHAT, LONG))
        wait_until(lambda: server.log.count("progress") >= 2, "two requests being served")
        killer = server.request("POST", CHAT, {"messages": USER, "top_k": 13})
        health = server.request("GET", "/health")
        later = server.request("POST", CHAT, {"messages": USER})
        whole.join(60)
        streamed.join(60)
        status = server.wait(60)
    for response in (killer, whole.result, later):
        assert response[0] == 503, response
        assert int(response[1]["retry-after"]) > 0
        assert "RuntimeError: ended by a test" in json.loads(response[2])["error"]["message"]
    assert health[0] == 503
    assert "the server ends" in json.loads(streamed.result[-1][1])["error"]["message"]
    assert status == 1
    assert server.log.splitlines()[-1] == (
        "mlx_lm.server --plugin echo --plugin failing: the server ends: its generation thread "
        "was stopped by RuntimeError: ended by a test"
    )
    assert json.loads(record.read_text())[-1] == ["shutdown"]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("options", [{}, {"seed": 3}], ids=["in a batch", "alone"])
def test_a_device_that_refuses_all_work_ends_the_server(
    environment: Environment, tiny_model: Path, tmp_path: Path, options: dict[str, int]
) -> None:
    """The next process reuses the turn that was stored before."""
    plugins = ("--plugin", "kvpersist", "--kvpersist-dir", str(tmp_path / "store"))
    question = {"messages": [{"role": "user", "content": "Why? " * 300}], "max_tokens": 2}
    with ServerProcess(
        tiny_model,
        *(*plugins, "--plugin", "failing"),
        python=str(environment.python),
        log_path=tmp_path / "server.log",
        env={"FAIL_IN": "device"},
    ) as server:
        before = server.request("POST", CHAT, question)
        waiting = InThread(lambda: server.request("POST", CHAT, LONG) if not options else None)
        if not options:  # a request with a seed would wait until this reply ends
            wait_until(lambda: "17/17" in server.log, "a reply that runs")
        last = server.request("POST", CHAT, {"messages": USER, "top_k": 13, **options})
        waiting.join(60)
        wait_until(lambda: server.request("GET", "/health")[0] == 503, "an unhealthy server")
        status = server.wait(60)
    assert before[0] == 200
    for response in (last, waiting.result or last):
        assert response[0] >= 500, response
        assert "Submissions Ignored" in json.loads(response[2])["error"]["message"]
    assert status == 1
    assert server.log.splitlines()[-1] == (
        "mlx_lm.server --plugin kvpersist --plugin failing: the server ends: its device computes "
        "nothing any more (RuntimeError: [METAL] Command buffer execution failed: Submissions "
        "Ignored)"
    )
    with ServerProcess(tiny_model, *plugins, python=str(environment.python)) as server:
        again = server.request("POST", CHAT, question)
    assert json.loads(again[2])["usage"]["prompt_tokens_details"]["cached_tokens"] > 250
    assert json.loads(again[2])["choices"] == json.loads(before[2])["choices"]


def test_closed_queue_fails_open_requests_and_refuses_new_requests() -> None:
    requests = RequestQueue()
    waiting: Queue[Any] = Queue()
    requests.put((waiting, "request", "args"))
    assert requests.get_nowait()[0] is waiting  # the request is served now, and no longer queued
    error = GenerationStopped("the end")
    requests.close(error)
    assert waiting.get_nowait() is error
    with pytest.raises(GenerationStopped):
        requests.put((Queue(), "request", "args"))


def test_request_added_while_the_queue_closes_gets_the_error() -> None:
    is_adding = threading.Event()

    class SlowSet(WeakSet[Any]):
        def add(self, item: Any) -> None:
            is_adding.set()
            time.sleep(0.1)
            super().add(item)

    requests, waiting = RequestQueue(), Queue[Any]()
    requests._reply_queues = SlowSet()
    late = InThread(lambda: requests.put((waiting, "request", "args")))
    assert is_adding.wait(60)
    requests.close(error := GenerationStopped("the end"))
    late.join()
    assert waiting.get_nowait() is error


def test_thread_error_is_reported_also_for_a_provider_without_is_ready(
    patched_server: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The provider in mlx-lm's own tests has no `is_ready`."""

    def fail(self: Any) -> None:
        raise RuntimeError("bad luck")

    monkeypatch.setattr(patched_server.ResponseGenerator.__mro__[2], "_generate", fail)
    monkeypatch.setattr("_thread.interrupt_main", lambda *args: None)
    provider = SimpleNamespace(cli_args=ARGS)
    generator = patched_server.ResponseGenerator(provider, None)
    generator.join()
    with pytest.raises(GenerationStopped, match="stopped by RuntimeError: bad luck"):
        generator.requests.put((Queue(), None, None))


def test_a_server_that_takes_no_requests_is_not_healthy(patched_server: ModuleType) -> None:
    generator = object.__new__(patched_server.ResponseGenerator)
    generator.model_provider = SimpleNamespace(is_ready=True)
    generator._has_ended = threading.Event()
    generator.requests = Queue()
    assert generator.is_healthy
    generator._has_ended.set()
    assert not generator.is_healthy
    generator._has_ended.clear()
    generator.requests.refusal = GenerationStopped("the end")
    assert not generator.is_healthy


def test_stopped_server_sends_an_error_to_a_running_stream(
    environment: Environment, tiny_model: Path, tmp_path: Path
) -> None:
    with ServerProcess(
        tiny_model,
        *("--plugin", "echo", "--echo-file", str(tmp_path / "calls.json")),
        python=str(environment.python),
        log_path=tmp_path / "server.log",
        env={"DRAIN_S": "0.1"},
    ) as server:
        events = server.events(CHAT, {**LONG, "stream": True})
        next(events)
        streamed = InThread(lambda: list(events))
        assert server.terminate(60.0) == 0
        streamed.join(60)
        assert "have not ended within 0.1 s" in server.log
    assert "the server ends" in json.loads(streamed.result[-1][1])["error"]["message"]
