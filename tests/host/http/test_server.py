"""The HTTP server with plugins: hooks, headers, routes, errors and the list of models."""

from __future__ import annotations

import gc
import json
import re
import socket
import warnings
from argparse import Namespace
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from socketserver import BaseServer
from types import ModuleType, SimpleNamespace
from typing import Any
from weakref import ref

import pytest
from huggingface_hub import scan_cache_dir

from mlx_lm_kvpersist.apis import openai_error
from mlx_lm_kvpersist.errors import ConfigError, PluginFault, RequestRefused
from mlx_lm_kvpersist.host.hooks import Route, check_headers, hookimpl
from mlx_lm_kvpersist.host.http import server as http_server
from mlx_lm_kvpersist.host.http.clients import ClientConnection, Clients
from mlx_lm_kvpersist.host.http.server import handler_with, is_alias
from mlx_lm_kvpersist.host.manager import plugin_routes
from mlx_lm_kvpersist.host.patching.probes import ARGS, answer
from tests.support.host import plugged

from ..plugins import Echo

HEALTH = b"GET /health HTTP/1.1\r\n\r\n"


def completion(body: Any = None, path: str = "/v1/completions") -> bytes:
    payload = json.dumps(body or {"prompt": "ping"}).encode()
    return (
        f"POST {path} HTTP/1.1\r\nX-Session-ID: s\r\nContent-Length: {len(payload)}\r\n\r\n"
    ).encode() + payload


@pytest.fixture
def keep_alive(patched_server: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A server that answers several requests on one connection, as a later stock may do."""
    monkeypatch.setattr(patched_server.APIHandler, "protocol_version", "HTTP/1.1")
    return patched_server


def heads(answered: str) -> list[str]:
    """Return status line and headers of each reply on a connection."""
    return [f"HTTP/1.1{reply}".partition("\r\n\r\n")[0] for reply in answered.split("HTTP/1.1")[1:]]


@pytest.mark.filterwarnings("ignore:mlx_lm.server is not recommended")
def test_plugin_headers_do_not_leak_into_other_replies(keep_alive: ModuleType) -> None:
    bad = b"POST /v1/completions HTTP/1.1\r\nContent-Length: 4\r\n\r\n{bad"
    requests = (completion(), HEALTH, completion(), b"OPTIONS /v1/models HTTP/1.1\r\n\r\n", bad)
    with plugged(Echo()):
        replies = heads(answer(keep_alive, b"".join(requests)))
    assert [head.split()[1] for head in replies] == ["200", "200", "200", "204", "400"]
    assert ["X-Echo" in head for head in replies] == [True, False, True, False, False]


@pytest.mark.filterwarnings("ignore:mlx_lm.server is not recommended")
def test_failed_generation_gets_no_plugin_header(
    patched_server: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stock answers 404 with the error's text; a failed request has no outcome to report."""
    captured: list[Any] = []

    class OneConnection:
        def __init__(self, address: Any, make_handler: Any) -> None:
            captured.append(make_handler)

        def serve_forever(self) -> None:
            captured.append(getattr(self, "request_queue_size", 5))
            captured[0](server_socket, ("127.0.0.1", 0), self)

    def generate(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("no such agent")

    server_socket, client_socket = socket.socketpair()
    generator = SimpleNamespace(cli_args=ARGS, generate=generate, stop_and_join=lambda: None)
    with server_socket, client_socket, plugged(echo := Echo()):
        client_socket.sendall(completion())
        patched_server._run_http_server("127.0.0.1", 0, generator, OneConnection)
        server_socket.close()
        reply = client_socket.makefile("rb").read().decode()
    assert " 404 " in reply.splitlines()[0]
    assert "X-Echo" not in reply
    assert "no such agent" in reply
    assert echo.calls == [["request_received", "s", False]]
    assert captured[1] == 128  # how many connections may wait


@pytest.mark.filterwarnings("ignore:mlx_lm.server is not recommended")
@pytest.mark.parametrize("stop", [[], ["never"]], ids=["no stop words", "stop words"])
@pytest.mark.parametrize("stream", [False, True])
def test_reply_sent_is_called_once_before_the_last_write(
    patched_server: ModuleType, stream: bool, stop: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[bytes] = []
    write = ClientConnection.write

    def recorded(self: ClientConnection, part: bytes) -> int:
        written.append(part)
        return write(self, part)

    monkeypatch.setattr(ClientConnection, "write", recorded)

    class Recording(Echo):
        @hookimpl
        def reply_sent(
            self, request: Any, content: str, reasoning: str, tool_calls: list[dict[str, Any]]
        ) -> None:
            sent = b"".join(written).decode()
            self.record("reply_sent", content, '"finish_reason": "length"' in sent)

    with plugged(recording := Recording()):
        answered = answer(
            patched_server,
            completion({"prompt": "ping", "stream": stream, "stop": stop}),
            model_provider=SimpleNamespace(tokenizer=None),
        )
    assert recording.calls == [["request_received", "s", stream], ["reply_sent", "pong", False]]
    assert answered.count('"finish_reason": "length"') == 1
    # Without streaming, the headers are made after the reply.
    assert ("X-Echo: 1" if stream else "X-Echo: 2") in answered


class Broken:
    """Fails in every hook of the HTTP thread."""

    @hookimpl
    def request_received(self, request: Any, headers: Any, body: Any) -> None:
        raise RuntimeError("request_received")

    @hookimpl
    def response_headers(self, request: Any) -> list[tuple[str, str]]:
        raise RuntimeError("response_headers")

    @hookimpl
    def reply_sent(self, request: Any, content: Any, reasoning: Any, tool_calls: Any) -> None:
        raise RuntimeError("reply_sent")


@pytest.mark.filterwarnings("ignore:mlx_lm.server is not recommended")
def test_failing_hooks_do_not_break_the_reply(
    patched_server: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    with plugged(Broken()):
        answered = answer(patched_server, completion())
    assert '"text": "pong"' in answered
    failed = re.findall(r"failed in hook (\w+);", caplog.text)
    assert sorted(failed) == ["reply_sent", "request_received", "response_headers"]


class Refusing:
    @hookimpl
    def request_received(self, request: Any, headers: Any, body: Any) -> None:
        raise RequestRefused("a header is wrong, expected none")


@pytest.mark.filterwarnings("ignore:mlx_lm.server is not recommended")
def test_plugin_can_refuse_a_request(patched_server: ModuleType) -> None:
    with plugged(Refusing()):
        answered = answer(patched_server, completion())
    assert answered.startswith("HTTP/1.0 400 ") and '"message": "a header is wrong' in answered


@pytest.mark.filterwarnings("ignore:mlx_lm.server is not recommended")
def test_plugin_routes_can_have_any_method(keep_alive: ModuleType) -> None:
    with plugged(echo := Echo()):
        echo.record("something")
        requests = (
            b"GET /echo?format=json HTTP/1.1\r\n\r\n",
            b"DELETE /echo HTTP/1.1\r\n\r\n",
            b"GET /echo HTTP/1.1\r\n\r\n",
            b"DELETE /health HTTP/1.1\r\n\r\n",
        )
        answered = answer(keep_alive, b"".join(requests))
    assert [head.split()[1] for head in heads(answered)] == ["200", "204", "200", "501"]
    assert '[["something"]]' in answered


@pytest.mark.filterwarnings("ignore:mlx_lm.server is not recommended")
def test_failing_plugin_route_answers_500_and_is_logged(
    patched_server: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    with plugged(Echo()):
        answered = answer(patched_server, b"GET /echo/broken HTTP/1.1\r\n\r\n")
    assert " 500 " in answered.splitlines()[0]
    assert "GET /echo/broken failed" in caplog.text


@pytest.mark.filterwarnings("ignore:mlx_lm.server is not recommended")
def test_request_without_a_model_gets_404_if_no_model_is_loaded(patched_server: ModuleType) -> None:
    arguments = Namespace(**{**vars(ARGS), "model": None})
    answered = answer(patched_server, completion(), cli_args=arguments)
    assert answered.startswith("HTTP/1.0 404 ")
    assert "this server has no model; name one in the request, or start it" in answered


class RefusingRoutes:
    @hookimpl
    def routes(self) -> list[Route]:
        return [
            Route("POST", "/read", lambda handler: handler.read_json()),
            Route("GET", "/", refuse_all),
        ]


def refuse_all(handler: Any) -> None:
    raise RequestRefused("nobody may ask", 403, "barred")


@pytest.mark.parametrize(
    ("request_bytes", "status", "error"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", 403, openai_error(403, "nobody may ask", "barred")),
        (
            b"POST /read HTTP/1.1\r\nContent-Length: 1\r\n\r\n7",
            400,
            openai_error(400, "the body is not a JSON object"),
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:mlx_lm.server is not recommended")
def test_refusals_by_plugin_routes_are_openai_errors(
    patched_server: ModuleType,
    caplog: pytest.LogCaptureFixture,
    request_bytes: bytes,
    status: int,
    error: dict[str, Any],
) -> None:
    with plugged(RefusingRoutes()):
        head, _, body = answer(patched_server, request_bytes).partition("\r\n\r\n")
    assert int(head.split()[1]) == status and json.loads(body) == error
    assert "failed" not in caplog.text


@pytest.mark.filterwarnings("ignore:mlx_lm.server is not recommended")
@pytest.mark.parametrize("is_healthy", [True, False])
def test_a_health_check_is_not_logged(
    patched_server: ModuleType, capsys: pytest.CaptureFixture[str], is_healthy: bool
) -> None:
    answered = answer(patched_server, HEALTH, is_healthy=is_healthy)
    assert answered.split()[1] == ("200" if is_healthy else "503")
    assert capsys.readouterr().err == ""
    answer(patched_server, HEALTH.replace(b"/health", b"/health?"))
    assert '"GET /health? HTTP/1.1" 404' in capsys.readouterr().err


class Recovering:
    """Answers with stock's method while it handles an exception."""

    handler: Any = None

    @hookimpl
    def routes(self) -> list[Route]:
        def handle(handler: Any) -> None:
            self.handler = ref(handler)
            try:
                raise RuntimeError("no file")
            except RuntimeError:
                handler.handle_health_check()

        return [Route("GET", "/recovers", handle)]


@pytest.mark.filterwarnings("ignore:mlx_lm.server is not recommended")
def test_handler_of_a_route_that_recovers_from_an_error_is_freed(
    patched_server: ModuleType,
) -> None:
    gc.disable()
    try:
        with plugged(recovering := Recovering()):
            answered = answer(patched_server, b"GET /recovers HTTP/1.1\r\n\r\n")
        assert answered.endswith('{"status": "ok"}') and recovering.handler() is None
    finally:
        gc.enable()


class Late:
    """Raises after it has answered."""

    @hookimpl
    def routes(self) -> list[Route]:
        def handle(handler: Any) -> None:
            handler.send_response(503)
            handler.end_headers()
            raise RuntimeError("too late")

        return [Route("GET", "/late", handle)]


@pytest.mark.filterwarnings("ignore:mlx_lm.server is not recommended")
def test_route_that_fails_after_its_answer_sends_no_second_answer(
    patched_server: ModuleType,
) -> None:
    with plugged(Late()):
        answered = answer(patched_server, b"GET /late HTTP/1.1\r\n\r\n")
    assert " 503 " in answered.splitlines()[0] and answered.count("HTTP/1.") == 1
    assert "\r\nRetry-After: 5\r\n" in answered  # also on a plugin's route


def test_route_parameter_matches_one_segment_after_exact_routes(server: ModuleType) -> None:
    braces, plain = Route("GET", "/x/{id}", print), Route("GET", "/x/y", print)
    routes = {("GET", route.path): route for route in (braces, plain)}
    handler = object.__new__(handler_with(server.APIHandler, routes, Clients()))
    handler.command = "GET"

    def route_of(path: str) -> Route | None:
        handler.path = path
        route: Route | None = handler._route()
        return route

    paths = ("/x/y?a=/x/z", "/x/z", "/x/", "/x", "/x/y/z", "/v/y")
    assert [route_of(path) for path in paths] == [plain, braces, None, None, None, None]


def test_route_pattern_is_compiled_once(
    server: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    route = Route("GET", "/x/{id}", print)
    handler = object.__new__(
        handler_with(server.APIHandler, {("GET", route.path): route}, Clients())
    )
    handler.command, handler.path = "GET", "/x/y"
    assert handler._route() is route
    monkeypatch.setattr("mlx_lm_kvpersist.host.hooks.re", None)
    assert handler._route() is route
    handler.command = "POST"
    assert handler._route() is None


def test_request_and_body_share_the_same_frozen_messages(patched_server: ModuleType) -> None:
    seen: list[tuple[Any, Any]] = []

    class Watching:
        @hookimpl
        def request_received(self, request: Any, headers: Any, body: Any) -> None:
            seen.append((request.messages, body["messages"]))

    body = {"messages": [{"role": "user", "content": "ping"}]}
    with plugged(Watching()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        generator = {"reads_images": lambda model: None}
        answer(patched_server, completion(body, "/v1/chat/completions"), **generator)
    [(messages, body_messages)] = seen
    assert messages is body_messages and messages == body["messages"]
    with pytest.raises(TypeError, match="cannot change"):
        messages.append({})


@pytest.mark.parametrize(
    ("model", "expected"),
    [("claude-opus-5", True), ("anthropic.claude", True), ("anthropic/claude-mlx", False)],
)
def test_claude_names_are_aliases_of_the_servers_model(model: str, expected: bool) -> None:
    assert is_alias(model) is expected


def test_two_plugins_with_the_same_route_are_refused() -> None:
    with (
        plugged(Echo(), Echo()),
        pytest.raises(ConfigError, match="two plugins answer GET /echo"),
    ):
        plugin_routes()


def test_failure_to_listen_stops_the_generation_thread(
    patched_server: ModuleType,
) -> None:
    """If the port is in use, stock raises, but its thread continues and the process never ends."""
    stopped: list[bool] = []
    generator = SimpleNamespace(stop_and_join=lambda: stopped.append(True))

    def refuse(*args: Any) -> Any:
        raise OSError("Address already in use")

    with pytest.raises(OSError, match="already in use"):
        patched_server._run_http_server(
            "127.0.0.1", 0, generator, type("S", (), {"__new__": refuse})
        )
    assert stopped == [True]


@pytest.mark.parametrize(
    ("name", "value", "is_valid"),
    [
        ("X-A", "b; c=d", True),
        ("X-A", "", True),
        ("", "b", False),
        ("X A", "b", False),
        ("X-A", "b\r\nSet-Cookie: c", False),
        ("X-A:", "b", False),
        ("X-A", "é", False),
    ],
)
def test_plugin_headers_with_invalid_names_or_values_are_refused(
    name: str, value: str, is_valid: bool
) -> None:
    with nullcontext() if is_valid else pytest.raises(PluginFault):
        check_headers([("X-B", "c"), (name, value)])


@pytest.mark.parametrize(("error", "level"), [(OSError("closed"), "INFO"), (KeyError(), "ERROR")])
@pytest.mark.filterwarnings("ignore:mlx_lm.server is not recommended")
def test_connection_error_is_logged_without_a_traceback_on_stderr(
    patched_server: ModuleType,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    level: str,
) -> None:
    """A signal can close a connection that was accepted but is not read yet."""

    class Failing(BaseServer):
        def __init__(self, address: Any, make_handler: Any) -> None: ...

        def serve_forever(self, poll_interval: float = 0.5) -> None:
            try:
                raise error
            except Exception:
                self.handle_error(None, ("127.0.0.1", 0))  # type: ignore[arg-type]

    caplog.set_level("INFO")
    patched_server._run_http_server("127.0.0.1", 0, SimpleNamespace(), Failing)
    lines = [line for line in caplog.records if line.name.startswith("mlx_lm_kvpersist.host.http")]
    assert [line.levelname for line in lines] == [level]
    assert "Traceback" not in capsys.readouterr().err


def test_handler_with_extends_the_given_class(server: ModuleType) -> None:
    class Own(server.APIHandler):  # type: ignore[misc, name-defined]
        pass

    route = Route("GET", "/x", lambda handler: None)
    handler = handler_with(Own, {("GET", "/x"): route}, Clients())
    assert issubclass(handler, Own)
    assert handler.plugin_routes == {("GET", "/x"): route}


@pytest.mark.filterwarnings("ignore:mlx_lm.server is not recommended")
def test_models_route_lists_downloaded_models_and_aliases_of_the_own_model(
    patched_server: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Claude Code offers only names that begin with "claude"."""
    snapshot = tmp_path / "models--some--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for name in ("config.json", "model.safetensors.index.json", "tokenizer_config.json"):
        (snapshot / name).write_text("{}", encoding="utf-8")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc", encoding="utf-8")
    monkeypatch.setattr(http_server, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(patched_server, "scan_cache_dir", partial(scan_cache_dir, tmp_path))
    own_model = tmp_path / "Qwen3 8B_4bit"
    own_model.mkdir()
    arguments = Namespace(**{**vars(ARGS), "model": str(own_model)})
    provider = SimpleNamespace(
        model_key=(str(own_model), None, None), cli_args=arguments, max_context=None
    )

    def listed(path: str) -> Any:
        sent = f"GET {path} HTTP/1.1\r\n\r\n".encode()
        answered = answer(patched_server, sent, model_provider=provider, cli_args=arguments)
        return json.loads(answered.partition("\r\n\r\n")[2])

    names = [model["id"] for model in listed("/v1/models")["data"]]
    assert names == [str(own_model), "some/model", "claude-Qwen3-8B-4bit", "default_model"]
    alias = listed("/v1/models/claude-Qwen3-8B-4bit")
    assert (alias["type"], alias["object"]) == ("model", "model")
    assert listed("/v1/models/some/model")["id"] == "some/model"
    assert listed("/v1/models/some/other")["error"]["code"] == "model_not_found"
    monkeypatch.chdir(own_model)
    arguments.model, provider.model_key = ".", (".", None, None)
    assert [model["id"] for model in listed("/v1/models")["data"]] == names
    arguments.served_name = "team"
    assert [model["id"] for model in listed("/v1/models")["data"]] == ["team", *names]
    assert listed("/v1/models/default_model")["id"] == "default_model"
    arguments.served_name = "default_model"
    assert [model["id"] for model in listed("/v1/models")["data"]] == ["default_model", *names[:-1]]
    arguments.model = None  # a model that a request loaded is not the default
    arguments.served_name = None
    assert [model["id"] for model in listed("/v1/models")["data"]] == names[:-1]
    assert listed("/v1/models/default_model")["error"]["code"] == "model_not_found"
