"""Beginnings that are computed and pinned before anybody asks for them."""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from email.message import Message
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import ConfigError, RequestRefused
from ..fields import require
from .admin import answering, check_operator, check_site
from .agents import Body, Service, name_session
from .messages import MessagesAPI
from .responses import ResponsesAPI

WARM_PATH = "/v1/kvpersist/warm"

_NOT_SENT = re.compile(r"[^!-~ ]+")
"""Characters that a header cannot have."""
_SAVED_S = 60.0
_POLL_S = 0.1

logger = logging.getLogger(__name__)


def warm_view(service: Service) -> Callable[[Any], None]:
    """Return the handler of the route: a body `{"name": …, "request": …}`."""

    def answer(handler: Any) -> Any:
        check_operator(handler, service.key)
        check_site(handler.headers, service.key)
        body = service.chat.read_body(handler)
        name = body.get("name")
        require(isinstance(name, str) and bool(name), "name", name, "a session's name")
        return warm(service, handler, str(name), body.get("request"))

    return answering(answer)


def warm(service: Service, handler: Any, name: str, content: Any) -> Any:
    """Compute a prompt, and pin the session that holds it.

    content: messages, or the body of a request to one of the APIs. Raises RequestRefused if it
    is none, or is not stored.
    """
    chat_body = chat_body_of(content, handler.headers)
    name = _NOT_SENT.sub("-", name)
    name_session(handler.headers, name)
    since_s = time.time()
    service.chat.prefill(handler, chat_body)
    if why := service.refusal():
        raise RequestRefused(f"the prompt was computed, but the model is not kept: {why}", 503)
    tenant, deadline_s = service.namespace(handler.headers), time.time() + _SAVED_S
    while time.time() < deadline_s:
        if (pinned := service.sessions().pin_newest(tenant, name, since_s)) is not None:
            return pinned
        time.sleep(_POLL_S)
    late = f"the prompt was computed, but not stored within {_SAVED_S:.0f} s; the log says why"
    raise RequestRefused(late, 503)


def warm_at_start(
    service: Service, files: Sequence[Path], serve: Callable[[Callable[[Any], None]], None]
) -> None:
    """Warm each file in a thread of its own; the log says what came of it.

    serve: see the hook `started`.
    """

    def run() -> None:
        for file in files:
            try:
                serve(partial(_warm_file, service, file))
            except Exception as error:
                logger.error("kvpersist: %s is not warmed: %s", file, error)

    threading.Thread(target=run, name="kvpersist-warm", daemon=True).start()


def _warm_file(service: Service, file: Path, handler: Any) -> None:
    done = warm(service, handler, session_name(file), read_prompt(file))
    logger.info("kvpersist: %s is computed and pinned: %s", file, done)


def chat_body_of(content: Any, headers: Message) -> Body:
    """Return messages, or the body of a request to one of the APIs, as a chat completion.

    Raises RequestRefused for anything else.
    """
    body = {"messages": content} if isinstance(content, list) else content
    is_body = isinstance(body, dict) and bool({"messages", "input"} & body.keys())
    require(is_body, "the prompt", content, "messages, or the body of a request that has some")
    tools = body.get("tools")
    is_anthropic = "system" in body or (
        isinstance(tools, list) and any(isinstance(t, dict) and "input_schema" in t for t in tools)
    )
    if "input" in body:
        body = ResponsesAPI().parse(body, headers).fields
    elif is_anthropic:
        body = MessagesAPI().parse(body, headers).fields
    # A limit of another name would go before the one token that is asked for.
    body = {name: value for name, value in body.items() if name != "max_completion_tokens"}
    return {**body, "model": "default_model"}


def read_prompt(file: Path) -> Any:
    """Return the JSON in a file. Raises ConfigError if there is none."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read as JSON: {error}") from error


def session_name(file: Path) -> str:
    return f"warm {file.stem}"
