"""A real server with the test plugins: hooks, signals, and failures at startup."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support import ServerError, ServerProcess, wait_until
from tests.support.host import Environment

HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"}]


@pytest.fixture(scope="module")
def echo_server(
    environment: Environment, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("echo")
    with ServerProcess(
        tiny_model,
        *("--plugin", "echo", "--echo-file", str(folder / "calls.json")),
        python=str(environment.python),
        log_path=folder / "server.log",
    ) as server:
        yield server


def calls(server: ServerProcess) -> list[list[Any]]:
    """Return and clear the plugin's recorded calls."""
    status, _, body = server.request("GET", "/echo")
    assert status == 200
    server.request("DELETE", "/echo")
    recorded: list[list[Any]] = json.loads(body)
    return recorded


def wait_for_insert(server: ServerProcess, n_calls: int = 1) -> list[list[Any]]:
    """Return the plugin's calls up to the end of `n_calls` turns, which comes after the replies."""
    recorded: list[list[Any]] = []

    def has_inserts() -> bool:
        recorded.extend(calls(server))
        ends = [call for call in recorded if call[0] == "insert" and call[-1] == "assistant"]
        return len(ends) >= n_calls

    wait_until(has_inserts, "an insert")
    return recorded


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("seed", [None, 1], ids=["batched", "single"])
def test_hooks_of_a_request_get_its_header_messages_and_tokens(
    echo_server: ServerProcess, stream: bool, seed: int | None
) -> None:
    calls(echo_server)
    question = f"How far is it? {stream} {seed}"
    messages = [*HELLO[:1], {"role": "user", "content": question}]
    params: dict[str, Any] = {} if seed is None else {"seed": seed}
    reply = echo_server.chat(messages, "session-1", stream, max_tokens=5, **params)
    assert int(reply.headers["x-echo"]) > 0
    # The model is loaded during the first request.
    recorded = [call for call in wait_for_insert(echo_server) if call[0] != "model_loaded"]
    hooks = [call[0] for call in recorded]
    assert hooks[0] == "request_received" and recorded[0][1:] == ["session-1", stream]
    assert ["prepare_messages", question] in recorded
    assert ["reply_sent", reply.text] in recorded
    assert ["reply_timed", 5, True] in recorded
    assert ["take_request", reply.prompt_tokens] in recorded
    # The batch returns the plugin's request object with the ids.
    inserted = [call for call in recorded if call[0] == "insert"]
    assert {call[1] for call in inserted} == {question}
    assert inserted[-1][2:] == [reply.prompt_tokens + 5, "assistant"]


@pytest.mark.parametrize("seed", [None, 1], ids=["batched", "single"])
def test_the_end_of_a_prompt_never_counts_as_the_end_of_a_reply(
    echo_server: ServerProcess, seed: int | None
) -> None:
    """Stock gives both the same type if a prompt is text, or ends with the result of a tool."""
    params: dict[str, Any] = {} if seed is None else {"seed": seed}
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    after_tool: list[dict[str, Any]] = [
        HELLO[1],
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "It is far."},
    ]
    for kind in ("tool", "text"):
        calls(echo_server)
        if kind == "tool":
            reply = echo_server.chat(after_tool, max_tokens=5, **params)
        else:
            reply = echo_server.complete("How far is it?", max_tokens=5, **params)
        inserted = [call for call in wait_for_insert(echo_server) if call[0] == "insert"]
        types = [[n_tokens, cache_type] for *_, n_tokens, cache_type in inserted]
        assert types[-2:] == [
            [reply.prompt_tokens - 1, "user"],
            [reply.prompt_tokens + 5, "assistant"],
        ]
        assert sum(cache_type == "assistant" for _, cache_type in types) == 1


def test_requests_in_one_batch_are_not_mixed_up(echo_server: ServerProcess) -> None:
    calls(echo_server)
    questions = [f"Question {n} {'long ' * n * 20}" for n in range(4)]

    def ask(question: str) -> tuple[str, int]:
        messages = [{"role": "user", "content": question}]
        reply = echo_server.chat(messages, max_tokens=12)
        return question, reply.prompt_tokens + 12

    with ThreadPoolExecutor(4) as pool:
        expected = dict(pool.map(ask, questions))
    recorded = wait_for_insert(echo_server, 4)
    ended = {
        call[1]: call[2] for call in recorded if call[0] == "insert" and call[3] == "assistant"
    }
    assert ended == expected


def test_stock_paths_are_answered_without_plugin_headers(echo_server: ServerProcess) -> None:
    for method, path, expected in (("GET", "/health", 200), ("GET", "/nothing", 404)):
        status, headers, _ = echo_server.request(method, path)
        assert status == expected
        assert "x-echo" not in headers


def test_plugin_that_edits_its_arguments_changes_no_reply(
    environment: Environment, tiny_model: Path, tmp_path: Path
) -> None:
    """The order of the plugins does not matter. Failures are logged; the reuse is the same."""
    conversations: list[list[str]] = []
    own, editing = "kvpersist", "editing"
    for n, plugins in enumerate(((own,), (editing, own), (own, editing))):
        options = [word for name in plugins for word in ("--plugin", name)]
        folder = str(tmp_path / f"store-{n}")
        with ServerProcess(
            tiny_model,
            *(*options, "--kvpersist-dir", folder),
            python=str(environment.python),
            log_path=tmp_path / f"server-{n}.log",
        ) as server:
            messages, texts = list(HELLO), []
            for _ in range(3):
                reply = server.chat(messages, "session", stream=is_odd_turn(messages))
                texts.append(f"{reply.text} {reply.headers['x-kvpersist']}".partition("ms=")[0])
                assert "x-b" not in reply.headers
                again = {"role": "user", "content": "And then?"}
                messages += [{"role": "assistant", "content": reply.text}, again]
        conversations.append(texts)
        if n > 0:
            assert texts == conversations[0]
            hooks = set(re.findall(r"plugin editing (?:failed )?in hook (\w+)", server.log))
            expected = {"request_received", "response_headers", "reply_sent", "reply_timed", "idle"}
            # A request is offered only until a plugin takes it.
            assert hooks == expected | ({"take_request"} if plugins[0] == editing else set())


def is_odd_turn(messages: list[dict[str, str]]) -> bool:
    return len(messages) % 4 == 2


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_cleanly(
    environment: Environment, tiny_model: Path, tmp_path: Path, number: signal.Signals
) -> None:
    record = tmp_path / "calls.json"
    with ServerProcess(
        tiny_model,
        *("--plugin", "echo", "--echo-file", str(record)),
        python=str(environment.python),
        log_path=tmp_path / "server.log",
    ) as server:
        server.chat(HELLO, max_tokens=2)
        status = server._signal(number, 60.0)
    assert (status, server.log.count("Traceback")) == (0, 0), server.log
    recorded = json.loads(record.read_text())
    assert recorded[0][0] == "configure"
    assert [call for call in recorded if call[0] == "shutdown"] == recorded[-1:]


def test_a_signal_ends_a_server_that_is_generating(
    environment: Environment, tiny_model: Path, tmp_path: Path
) -> None:
    record = tmp_path / "calls.json"
    with ServerProcess(
        tiny_model,
        *("--plugin", "echo", "--echo-file", str(record)),
        python=str(environment.python),
        log_path=tmp_path / "server.log",
        env={"DRAIN_S": "0.1"},
    ) as server:
        events = server.events(
            "/v1/chat/completions", {"messages": HELLO, "max_tokens": 100_000, "stream": True}
        )
        next(events)
        assert server.terminate(60.0) == 0, server.log
        events.close()
    calls = json.loads(record.read_text())
    # The interrupted reply ends on another thread, and may record `reply_timed` later.
    assert [call for call in calls if call[0] != "reply_timed"][-1] == ["shutdown"]


@pytest.mark.parametrize("log_level", ["INFO", "DEBUG"])
def test_a_default_model_that_cannot_be_prepared_stops_the_server(
    environment: Environment, tiny_model: Path, log_level: str
) -> None:
    """The generation thread loads the model while the server already listens."""
    done = environment.run_forked(
        *("mlx_lm.server", "--plugin", "failing", "--model", tiny_model),
        *("--port", str(free_port()), "--log-level", log_level),
        env={"FAIL_IN": "model_loaded"},
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1] == (
        "mlx_lm.server --plugin failing: stopped by an unexpected RuntimeError: a fault of the "
        "plugin (--log-level DEBUG shows the traceback)"
    )
    assert done.stderr.count("Traceback") == (1 if log_level == "DEBUG" else 0)


def test_requested_model_that_cannot_be_prepared_fails_only_its_requests(
    environment: Environment, tiny_model: Path, tmp_path: Path
) -> None:
    """The server continues, and never serves such a model without the plugin."""
    client = ServerProcess(tiny_model, log_path=tmp_path / "server.log", port=free_port())
    with client.log_path.open("wb") as log:
        process = subprocess.Popen(
            [environment.bin / "mlx_lm.server", "--plugin=failing", f"--port={client.port}"],
            stdout=log,
            stderr=log,
            env={"FAIL_IN": "model_loaded", "HF_HUB_OFFLINE": "1"},
        )
    try:
        wait_until(lambda: client._health() == 200, "a healthy server", 60)
        for _ in range(2):
            with pytest.raises(ServerError, match="a fault of the plugin"):
                client.chat(HELLO, model=str(tiny_model))
        assert process.poll() is None
    finally:
        process.terminate()
        status = process.wait(25)
    assert status == 0


def test_a_port_in_use_ends_the_process_with_one_line(
    environment: Environment, tiny_model: Path
) -> None:
    """Stock raises, but its generation thread keeps the process running."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = environment.run_forked(
            "mlx_lm.server", "--plugin", "echo", "--model", tiny_model, "--port", str(port)
        )
    assert (done.returncode, done.stderr) == (
        1,
        f"mlx_lm.server --plugin echo: cannot listen at 127.0.0.1 port {port}: Address already "
        "in use; choose another --port, or a --host of this machine\n",
    )


@pytest.mark.parametrize(
    ("option", "expected_message"),
    [
        (("--host", "203.0.113.1"), "cannot listen at 203.0.113.1 port 8080: Cannot assign"),
        (("--host", "no.such.host.invalid"), "cannot listen at no.such.host.invalid port 8080: "),
        (("--port", "99999"), "cannot listen at 127.0.0.1 port 99999: "),
        (("--model", "/no/such/model"), "the model folder /no/such/model does not exist; expected"),
        (("--model", "a/b/typo"), "the model folder a/b/typo does not exist; expected"),
        (("--model", __file__), f"the model folder {__file__} is a file; expected a folder"),
        (("--model", "no-such/repository"), "--model no-such/repository cannot be loaded (no "),
    ],
)
def test_bad_command_line_ends_the_process_without_a_traceback(
    environment: Environment, option: tuple[str, ...], expected_message: str
) -> None:
    more = () if option[0] != "--model" else ("--port", str(free_port()))
    done = environment.run_forked("mlx_lm.server", "--plugin", "echo", *option, *more)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        f"mlx_lm.server --plugin echo: {expected_message}"
    )
    assert "Traceback" not in done.stderr


def test_a_folder_that_cannot_be_made_ends_the_process_with_one_line(
    environment: Environment, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "store"
    done = environment.run_forked(
        *("mlx_lm.server", "--plugin", "kvpersist", "--port", "0"), "--kvpersist-dir", folder
    )
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert str(folder) in done.stderr and "Traceback" not in done.stderr


def test_health_answers_503_until_the_model_is_loaded(
    environment: Environment, tiny_model: Path, tmp_path: Path
) -> None:
    server = ServerProcess(
        tiny_model,
        *("--plugin", "echo", "--echo-file", str(tmp_path / "calls"), "--plugin", "failing"),
        python=str(environment.python),
        log_path=tmp_path / "server.log",
        port=free_port(),
        env={"SLOW_LOAD_S": "2"},
    )
    starting = threading.Thread(target=server.start)
    starting.start()
    try:
        wait_until(lambda: server._health() is not None, "an answer of /health", 60)
        assert server.request("GET", "/health")[0] == 503
        starting.join(60)
        assert server.request("GET", "/health")[0] == 200
        assert "model_loaded" in [call[0] for call in calls(server)]
    finally:
        starting.join(60)
        server.stop()


def free_port() -> int:
    """Return a port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port
