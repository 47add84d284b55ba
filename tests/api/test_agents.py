"""Agents over simulated chat completions; tests/server has a real server."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from email.message import Message
from io import BytesIO
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_lm_kvpersist.api import agents
from mlx_lm_kvpersist.api.agents import AgentsAPI
from mlx_lm_kvpersist.errors import RequestRefused


class Chat:
    """Computes nothing; `during` is called while a prompt is computed."""

    def __init__(self) -> None:
        self.during: Callable[[], None] = lambda: None
        self.sessions: list[list[str] | None] = []

    def answer(self, handler: Any, chat_body: dict[str, Any]) -> None:
        headers = handler.headers
        self.sessions.append(headers.get_all("X-Session-ID"))
        handler.send_response(200)

    def prefill(self, chat_body: dict[str, Any]) -> tuple[int, int]:
        self.during()
        return 1, 0


class Sessions:
    """A store without sessions."""

    def describe_named(self, namespace: str, name: str) -> dict[str, Any]:
        return {}

    def each_named(self, namespace: str, name: str, change: object) -> bool:
        return False

    def changed(self, change: object) -> None: ...
    def pin(self, session_id: str, pinned: bool) -> None: ...
    def evict(self, session_id: str) -> None: ...
    def delete(self, session_id: str) -> None: ...

    def pin_newest(self, namespace: str, name: str, since_s: float) -> dict[str, Any] | None:
        return None


class Service:
    def __init__(self) -> None:
        self.chat, self.sessions = Chat(), Sessions()
        service = agents.Service(lambda: self.sessions, None, False)
        self.api = AgentsAPI(service, lambda name, namespace: None)
        self.handle = {(method, path): handle for method, path, handle in self.api.routes()}

    def call(
        self, method: str, path: str, body: Any = None, namespace: str = ""
    ) -> tuple[int, Any]:
        """Return the status and the content of an answer."""
        headers = Message()
        headers["X-KVPersist-Namespace"] = namespace
        headers["Host"], headers["X-Session-ID"] = "localhost", "another's"
        sent: list[int] = []
        handler: Any = SimpleNamespace(
            headers=headers,
            command=method,
            path=path,
            read_body=lambda: body or {},
            prefill=self.chat.prefill,
            serve_chat=lambda chat_body: self.chat.answer(handler, chat_body),
            client_address=("127.0.0.1", 0),
            wfile=BytesIO(),
            send_response=sent.append,
            send_header=lambda name, value: None,
            end_headers=lambda: None,
        )
        route = path.partition("?")[0].replace("/v1/agents/a", "/v1/agents/{id}")
        self.handle[method, route](handler)
        return sent[0], json.loads(handler.wfile.getvalue() or "null")


@pytest.fixture
def service() -> Service:
    return Service()


def test_an_agent_that_is_being_made_is_not_deleted(service: Service) -> None:
    found: list[int] = []
    service.chat.during = lambda: found.append(service.call("DELETE", "/v1/agents/a")[0])
    assert service.call("POST", "/v1/agents", {"id": "a", "system": "s"})[0] == 201
    assert found == [409]
    assert service.call("DELETE", "/v1/agents/a")[0] == 204


def test_an_agent_that_is_deleted_while_a_request_is_read_does_not_come_back(
    service: Service,
) -> None:
    class Slow(dict[str, Any]):
        def get(self, name: str, default: Any = None) -> Any:
            if name == "content":
                assert service.call("DELETE", "/v1/agents/a")[0] == 204
            return super().get(name, default)

    service.call("POST", "/v1/agents", {"id": "a"})
    asked = {"messages": [Slow(role="user", content="x")]}
    status, answer = service.call("POST", "/v1/agents/a/generate", asked)
    assert (status, answer["error"]["message"]) == (404, "the agent a was deleted")


def test_an_agents_session_is_its_own_whatever_a_client_says(service: Service) -> None:
    service.call("POST", "/v1/agents", {"id": "a"})
    asked = {"messages": [{"role": "user", "content": "x"}]}
    assert service.call("POST", "/v1/agents/a/generate", asked)[0] == 200
    assert service.chat.sessions == [["agent:a"]]


@pytest.mark.parametrize("field", ["id", "system", "messages", "tools", "model"])
def test_a_null_field_of_a_new_agent_is_not_set(service: Service, field: str) -> None:
    assert service.call("POST", "/v1/agents", {field: None})[0] == 201


def test_an_agent_whose_session_could_not_be_deleted_can_be_deleted_again(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: object) -> bool:
        raise RequestRefused("the store is busy; ask again", 503)

    for name in ("a", "ab"):
        service.call("POST", "/v1/agents", {"id": name})
    service.api._agents["", "a"].created -= 60
    with monkeypatch.context() as patch:
        patch.setattr(service.sessions, "each_named", refuse)
        assert service.call("DELETE", "/v1/agents/a")[0] == 503
    assert [one["id"] for one in service.call("GET", "/v1/agents")[1]["data"]] == ["a", "ab"]
    assert service.call("DELETE", "/v1/agents/a")[0] == 204


def test_how_many_there_are_is_counted_for_each_namespace(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "MAX_AGENTS", 2)
    monkeypatch.setattr(agents, "MAX_ALL_AGENTS", 3)
    asked = [(who, name) for who in ("Alice", "Bob") for name in "abc"]
    made = [service.call("POST", "/v1/agents", {"id": name}, who) for who, name in asked]
    assert [status for status, _ in made] == [201, 201, 429, 201, 503, 503]


def test_there_are_only_so_many(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agents, "MAX_AGENTS", 2)
    made = [service.call("POST", "/v1/agents", {"id": name})[0] for name in "abc"]
    assert made == [201, 201, 429]
    assert service.call("DELETE", "/v1/agents/a")[0] == 204
    assert service.call("POST", "/v1/agents", {"id": "c"})[0] == 201


def test_agents_are_listed_while_another_cannot_be_made(service: Service) -> None:
    is_there, may_fail = Event(), Event()

    class Slow(dict[Any, Any]):
        def values(self) -> Any:
            for each in super().values():
                may_fail.set()
                time.sleep(0.05)
                yield each

    def refuse(namespace: str, name: str) -> dict[str, Any]:
        is_there.set()
        assert may_fail.wait(60)
        raise RequestRefused("no")

    service.api._agents = Slow()
    service.sessions.describe_named = refuse  # type: ignore[method-assign]
    thread = Thread(target=service.call, args=("POST", "/v1/agents", {"id": "a"}))
    thread.start()
    assert is_there.wait(60)
    assert service.call("GET", "/v1/agents")[0] == 400  # the store refuses
    thread.join()
