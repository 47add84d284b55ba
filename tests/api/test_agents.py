"""Agents over fake chat completions; tests/server uses a real server."""

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
    """A fake chat API; it calls `during` instead of computing a prompt."""

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


def test_agent_cannot_be_deleted_during_its_creation(service: Service) -> None:
    statuses: list[int] = []
    service.chat.during = lambda: statuses.append(service.call("DELETE", "/v1/agents/a")[0])
    assert service.call("POST", "/v1/agents", {"id": "a", "system": "s"})[0] == 201
    assert statuses == [409]
    assert service.call("DELETE", "/v1/agents/a")[0] == 204


def test_generate_answers_404_if_the_agent_is_deleted_during_parsing(
    service: Service,
) -> None:
    class Slow(dict[str, Any]):
        def get(self, name: str, default: Any = None) -> Any:
            if name == "content":
                assert service.call("DELETE", "/v1/agents/a")[0] == 204
            return super().get(name, default)

    service.call("POST", "/v1/agents", {"id": "a"})
    sent_body = {"messages": [Slow(role="user", content="x")]}
    status, answer = service.call("POST", "/v1/agents/a/generate", sent_body)
    assert (status, answer["error"]["message"]) == (404, "the agent a was deleted")


def test_agent_ignores_the_clients_session_header(service: Service) -> None:
    service.call("POST", "/v1/agents", {"id": "a"})
    sent_body = {"messages": [{"role": "user", "content": "x"}]}
    assert service.call("POST", "/v1/agents/a/generate", sent_body)[0] == 200
    assert service.chat.sessions == [["agent:a"]]


@pytest.mark.parametrize("field", ["id", "system", "messages", "tools", "model"])
def test_null_field_of_a_new_agent_is_not_set(service: Service, field: str) -> None:
    assert service.call("POST", "/v1/agents", {field: None})[0] == 201
    (agent,) = service.api._agents.values()
    assert agent.id.startswith("agent-") and agent.beginning == {"messages": []}


def test_failed_deletion_keeps_the_agent_and_can_be_repeated(
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
    assert [agent["id"] for agent in service.call("GET", "/v1/agents")[1]["data"]] == ["a", "ab"]
    assert service.call("DELETE", "/v1/agents/a")[0] == 204


def test_agent_limits_apply_per_namespace_and_in_total(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "MAX_AGENTS", 2)
    monkeypatch.setattr(agents, "MAX_ALL_AGENTS", 3)
    agents_to_make = [(tenant, name) for tenant in ("Alice", "Bob") for name in "abc"]
    answers = [
        service.call("POST", "/v1/agents", {"id": name}, tenant) for tenant, name in agents_to_make
    ]
    assert [status for status, _ in answers] == [201, 201, 429, 201, 503, 503]


def test_deletion_frees_a_place_within_the_agent_limit(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "MAX_AGENTS", 2)
    created = [service.call("POST", "/v1/agents", {"id": name})[0] for name in "abc"]
    assert created == [201, 201, 429]
    assert service.call("DELETE", "/v1/agents/a")[0] == 204
    assert service.call("POST", "/v1/agents", {"id": "c"})[0] == 201


def test_agents_can_be_listed_while_a_creation_fails(service: Service) -> None:
    is_added, may_fail = Event(), Event()

    class Slow(dict[Any, Any]):
        def values(self) -> Any:
            for agent in super().values():
                may_fail.set()
                time.sleep(0.05)
                yield agent

    def refuse(namespace: str, name: str) -> dict[str, Any]:
        is_added.set()
        assert may_fail.wait(60)
        raise RequestRefused("no")

    service.api._agents = Slow()
    service.sessions.describe_named = refuse  # type: ignore[method-assign]
    thread = Thread(target=service.call, args=("POST", "/v1/agents", {"id": "a"}))
    thread.start()
    assert is_added.wait(60)
    assert service.call("GET", "/v1/agents")[0] == 400  # the store refuses
    thread.join()
