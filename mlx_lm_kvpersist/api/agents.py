"""Agents: sessions with a fixed beginning, which is computed before the first question.

The server forgets agents when it ends. Their sessions stay in the store.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from email.message import Message as Headers
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote

from ..apis import openai_error, placed_objects, require, require_text, without_null
from ..errors import ConfigError, RequestRefused
from .admin import JSON_HEADERS, Answer, answering, check_operator, check_site, operator_route
from .messages import MessagesAPI
from .responses import ResponsesAPI
from .session_keys import names_namespace, namespace, short_name

AGENTS_PATH = "/v1/agents"
AGENT_PATH = f"{AGENTS_PATH}/{{id}}"
OPENAPI_PATH = "/v1/kvpersist/openapi.json"
MAX_AGENTS, MAX_ALL_AGENTS = 1000, 10_000
"""The limits for one namespace, and for all namespaces together."""
WARM_PATH = "/v1/kvpersist/warm"

_OPENAPI = Path(__file__).with_name("openapi.json")
_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "TRACE", "QUERY")
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_PAGE, _MAX_PAGE = 20, 100
_NOT_SENT = re.compile(r"[^!-~ ]+")
"""Characters that are not printable ASCII: a header gets "-" instead."""
_SAVED_S = 60.0
_POLL_S = 0.1

logger = logging.getLogger(__name__)

Body = dict[str, Any]


Call = Callable[[Any, Body], Any]


@dataclass
class Agent:
    """beginning: the messages, tools and model that each request to the agent gets."""

    id: str
    namespace: str
    created: int
    beginning: Body
    n_running: int = 0

    @property
    def session(self) -> str:
        """No client uses such a name by accident."""
        return f"agent:{self.id}"


@dataclass(frozen=True)
class Service:
    """The functions and options that agents and warming use.

    sessions: returns the store's `StoredSessions`, or raises RequestRefused. key: the operator's
    key. by_key: whether each API key has a separate namespace. refusal: returns why the loaded
    model's cache is not supported, or "".
    """

    sessions: Callable[[], Any]
    key: str | None
    by_key: bool
    refusal: Callable[[], str] = lambda: ""

    def namespace(self, headers: Headers) -> str:
        return namespace(headers, by_key=self.by_key)


def name_session(headers: Headers, name: str) -> None:
    """Replace the client's session name."""
    del headers["X-Session-ID"]
    headers["X-Session-ID"] = name


class AgentsAPI:
    """Answers `/v1/agents`. A request sees only the agents of its own namespace.

    forget: removes the records of a session's requests, by the session's name and namespace.
    """

    def __init__(self, service: Service, forget: Callable[[str, str], None]) -> None:
        self._service, self._forget = service, forget
        self._agents: dict[tuple[str, str], Agent] = {}
        self._lock = threading.Lock()

    def routes(self) -> Iterator[tuple[str, str, Callable[[Any], None]]]:
        """Yield each route's method, path and function. Wrong methods answer 405."""
        paths: dict[str, dict[str, Call]] = {
            AGENTS_PATH: {"GET": self._list, "POST": self._create},
            AGENT_PATH: {
                "GET": lambda handler, body: self._describe(self._find(handler)),
                "DELETE": self._delete,
            },
            f"{AGENT_PATH}/generate": {"POST": self._generate},
            f"{AGENT_PATH}/evict": {"POST": self._evict},
            f"{AGENT_PATH}/pin": {"POST": self._pin},
            OPENAPI_PATH: {
                "GET": lambda handler, body: Answer(_OPENAPI.read_bytes(), headers=JSON_HEADERS)
            },
        }
        for path, calls in paths.items():
            for method in _METHODS:
                yield method, path, answering(partial(self._answer, calls=calls))

    def _answer(self, handler: Any, calls: Mapping[str, Call]) -> Any:
        body, method = without_null(handler.read_body()), handler.command
        if method in calls:
            return calls[method](handler, body)
        why = f"{method} is not known here; expected {' or '.join(calls)}"
        return Answer(openai_error(405, why), 405, {"Allow": ", ".join(calls)})

    def _create(self, handler: Any, body: Body) -> Answer:
        check_site(handler.headers, self._service.key)
        agent = Agent(
            body.get("id", f"agent-{uuid.uuid4().hex}"),
            self._service.namespace(handler.headers),
            int(time.time()),
            _beginning(body),
        )
        is_id = isinstance(agent.id, str) and bool(_ID.fullmatch(agent.id))
        require(is_id, "id", agent.id, "1 to 64 letters, digits, dots, hyphens or underscores")
        with self._lock:
            if (agent.namespace, agent.id) in self._agents:
                raise RequestRefused(f"the agent {agent.id} exists; delete it first", 409)
            if sum(name == agent.namespace for name, _ in self._agents) >= MAX_AGENTS:
                raise RequestRefused(f"there are {MAX_AGENTS} agents; delete one first", 429)
            if len(self._agents) >= MAX_ALL_AGENTS:
                raise RequestRefused("the server can take no more agents now", 503)
            self._agents[agent.namespace, agent.id] = agent
        prefilled = None
        try:
            if agent.beginning["messages"]:
                with self._running(handler.headers, agent):
                    n_prompt, n_cached = handler.prefill(agent.beginning)
                # Wait until the session is on disk. A slow disk is not an error.
                with suppress(RequestRefused):
                    self._service.sessions().changed(lambda disk: None)
                prefilled = {"tokens": n_prompt, "reused": n_cached}
            described = {**self._describe(agent), "prefilled": prefilled}
            return Answer(described, 201, {"Location": f"{AGENTS_PATH}/{quote(agent.id)}"})
        except BaseException:
            with self._lock:
                self._agents.pop((agent.namespace, agent.id), None)
            raise

    def _list(self, handler: Any, body: Body) -> Body:
        self._check_operator(handler)
        query = parse_qs(handler.path.partition("?")[2], keep_blank_values=True)
        limit_text = query.get("limit", [str(_PAGE)])[-1]
        limit = int(limit_text) if re.fullmatch("[0-9]{1,3}", limit_text) else 0
        require(1 <= limit <= _MAX_PAGE, "limit", limit_text, f"a number from 1 to {_MAX_PAGE}")
        own = self._service.namespace(handler.headers)
        with self._lock:
            agents = [agent for agent in self._agents.values() if agent.namespace == own]
        agents.sort(key=lambda agent: agent.created)
        if "after" in query:
            ids, after = [agent.id for agent in agents], query["after"][-1]
            if after not in ids:
                why = "after does not name an agent, expected the last id of a page"
                raise RequestRefused(why, 404)
            agents = agents[ids.index(after) + 1 :]
        page = [self._describe(agent) for agent in agents[:limit]]
        return {"object": "list", "data": page, "has_more": len(agents) > len(page)}

    def _generate(self, handler: Any, body: Body) -> None:
        agent = self._find(handler)
        messages = _messages(body.get("messages"))
        require(bool(messages), "messages", messages, "at least one message")
        most = body.get("max_tokens", 1)
        require(not isinstance(most, bool), "max_tokens", most, "an integer")
        if isinstance(most, float) and most.is_integer():  # 2.0 is an integer in JSON Schema
            body = {**body, "max_tokens": int(most)}
        messages = [*agent.beginning["messages"], *messages]
        with self._running(handler.headers, agent):
            handler.serve_chat({**agent.beginning, **body, "messages": messages})

    def _evict(self, handler: Any, body: Body) -> Body:
        self._check_operator(handler)
        agent = self._find(handler)
        sessions = self._service.sessions()
        sessions.each_named(agent.namespace, agent.session, sessions.evict)
        return self._describe(agent)

    def _pin(self, handler: Any, body: Body) -> Body:
        self._check_operator(handler, everywhere=True)
        agent = self._find(handler)
        pinned = body.get("pinned", True)
        require(isinstance(pinned, bool), "pinned", pinned, "a boolean")
        sessions = self._service.sessions()
        pin = partial(sessions.pin, pinned=pinned)
        if not sessions.each_named(agent.namespace, agent.session, pin):
            raise RequestRefused(f"nothing of the agent {agent.id} is stored; generate first", 409)
        return self._describe(agent)

    def _delete(self, handler: Any, body: Body) -> Answer:
        self._check_operator(handler)
        agent = self._find(handler)
        with self._lock:
            if agent.n_running:
                raise RequestRefused(f"the agent {agent.id} is generating; delete it later", 409)
            self._agents.pop((agent.namespace, agent.id), None)
        try:
            sessions = self._service.sessions()
            sessions.each_named(agent.namespace, agent.session, sessions.delete)
        except BaseException:
            with self._lock:  # so that the client can try again
                self._agents.setdefault((agent.namespace, agent.id), agent)
            raise
        self._forget(agent.session, agent.namespace)
        return Answer(b"", 204, JSON_HEADERS)

    def _find(self, handler: Any) -> Agent:
        name = unquote(handler.path.partition("?")[0].split("/")[3])
        agent = self._agents.get((self._service.namespace(handler.headers), name))
        if agent is None:
            why = "there is no such agent; a server knows those that were created since it started"
            raise RequestRefused(why, 404)
        return agent

    def _describe(self, agent: Agent) -> Body:
        stored = self._service.sessions().describe_named(agent.namespace, agent.session)
        fields = {"id": agent.id, "object": "agent", "created": agent.created}
        return {**fields, "messages": len(agent.beginning["messages"]), **stored}

    def _check_operator(self, handler: Any, *, everywhere: bool = False) -> None:
        """Allow the operator. Unless `everywhere`, also allow requests that name a namespace."""
        if handler.command != "GET":
            check_site(handler.headers, self._service.key)
        if not everywhere and names_namespace(handler.headers, by_key=self._service.by_key):
            return
        check_operator(handler, self._service.key)

    @contextmanager
    def _running(self, headers: Headers, agent: Agent) -> Iterator[None]:
        """Give a request the agent's session; nobody can delete the agent in the `with` block."""
        name_session(headers, agent.session)
        with self._lock:
            if self._agents.get((agent.namespace, agent.id)) is not agent:
                raise RequestRefused(f"the agent {agent.id} was deleted", 404)
            agent.n_running += 1
        try:
            yield
        finally:
            with self._lock:
                agent.n_running -= 1


def _beginning(body: Body) -> Body:
    messages = _messages(body.get("messages", []))
    if "system" in body:
        text = require_text("system", body["system"])
        messages = [{"role": "system", "content": text}, *messages]
    beginning: Body = {"messages": messages}
    if "tools" in body:
        beginning["tools"] = [tool for _, tool in placed_objects("tools", body["tools"])]
    if "model" in body:
        beginning["model"] = require_text("model", body["model"])
    return beginning


def _messages(messages: Any) -> list[Body]:
    for place, message in placed_objects("messages", messages):
        content = message.get("content")
        require_text(f"{place}.role", message.get("role"))
        is_content = isinstance(content, str | list | None)
        require(is_content, f"{place}.content", content, "text, a list of parts, or null")
    return list(messages)


def warm_view(service: Service) -> Callable[[Any], None]:
    """Return the function of WARM_PATH, which takes a body `{"name": …, "request": …}`."""

    def answer(handler: Any) -> Any:
        body = handler.read_body()
        name = body.get("name")
        require(isinstance(name, str) and bool(name), "name", name, "a session's name")
        return warm(service, handler, name, body.get("request"))

    return operator_route(answer, service.key)


def warm(service: Service, handler: Any, name: str, content: Any) -> Any:
    """Compute a prompt, and pin the session that holds it.

    `content` is messages, or an API's request body. Raises RequestRefused for other content, or if
    the prompt is not stored.
    """
    chat_body = chat_body_of(content, handler.headers)
    name = short_name(_NOT_SENT.sub("-", name))
    name_session(handler.headers, name)
    since_s = time.time()
    handler.prefill(chat_body)
    if why := service.refusal():
        raise RequestRefused(f"the prompt was computed, but the model is not supported: {why}", 503)
    tenant, deadline_s = service.namespace(handler.headers), time.monotonic() + _SAVED_S
    while time.monotonic() < deadline_s:
        if (pinned := service.sessions().pin_newest(tenant, name, since_s)) is not None:
            return pinned
        time.sleep(_POLL_S)
    why = f"the prompt was computed, but not stored within {_SAVED_S:.0f} s; the log says why"
    raise RequestRefused(why, 503)


def warm_at_start(
    service: Service, files: Sequence[Path], serve: Callable[[Callable[[Any], None]], None]
) -> None:
    """Compute and pin each file's prompt, in a separate thread. `started` describes `serve`."""

    def warm_file(file: Path, handler: Any) -> None:
        done = warm(service, handler, session_name(file), read_prompt(file))
        logger.info("kvpersist: %s is computed and pinned: %s", file, done)

    def run() -> None:
        for file in files:
            try:
                serve(partial(warm_file, file))
            except Exception as error:
                logger.error("kvpersist: %s is not warmed: %s", file, error)

    threading.Thread(target=run, name="kvpersist-warm", daemon=True).start()


def chat_body_of(content: Any, headers: Headers) -> Body:
    """Convert messages, or any API's request body, to a chat completion's body.

    Raises RequestRefused for anything else.
    """
    body = {"messages": content} if isinstance(content, list) else content
    body = without_null(body) if isinstance(body, dict) else {}
    is_body = bool({"messages", "input"} & body.keys())
    require(is_body, "the prompt", content, "messages, or the body of a request that has some")
    tools = body.get("tools")
    is_anthropic = "system" in body or (
        isinstance(tools, list) and any(isinstance(t, dict) and "input_schema" in t for t in tools)
    )
    if "input" in body:
        body = ResponsesAPI().parse(body, headers).fields
    elif is_anthropic:
        body = MessagesAPI().parse(body, headers).fields
    body.pop("max_completion_tokens", None)  # it would override the limit of one token
    return {**body, "model": "default_model"}


def read_prompt(file: Path) -> Any:
    """Raises ConfigError if the file cannot be read as JSON."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read as JSON: {error}") from error


def session_name(file: Path) -> str:
    return f"warm {file.stem}"
