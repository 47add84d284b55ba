"""Hooks of schemathesis that keep requests small and create the agent that requests name."""

from __future__ import annotations

import os
from typing import Any
from urllib.request import Request, urlopen

import schemathesis

KNOWN = "one"


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Shorten values; valid requests stay valid, and invalid requests stay invalid."""
    body = case.body
    if isinstance(body, dict):
        most = body.get("max_tokens")
        if type(most) is int or (type(most) is float and most.is_integer()):
            body["max_tokens"] = min(most, 2)
        if isinstance(body.get("model"), str):
            body["model"] = "default_model"
        for name in ("system", "messages"):
            if isinstance(body.get(name), str | list):
                body[name] = body[name][:3]
        for message in body["messages"] if isinstance(body.get("messages"), list) else ():
            parts = message.get("content") if isinstance(message, dict) else None
            for short in (message, *(parts if isinstance(parts, list) else ())):
                for name in ("role", "content", "text") if isinstance(short, dict) else ():
                    if isinstance(short.get(name), str):
                        short[name] = short[name][:20]
    is_valid = str(case.path_parameters.get("id", "-")).isalnum()
    if is_valid and case.meta.phase.name.value != "stateful":
        case.path_parameters["id"] = KNOWN
        case.headers.pop("X-KVPersist-Namespace", None)
        create = Request(os.environ["AGENTS_URL"], f'{{"id": "{KNOWN}"}}'.encode(), method="POST")
        try:
            urlopen(create).close()
        except OSError:  # the agent exists
            pass
