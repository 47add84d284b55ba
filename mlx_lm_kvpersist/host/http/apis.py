"""Functions for routes: reply in another API, count tokens, compute a prompt."""

from __future__ import annotations

from typing import Any

from ...apis import API, Request
from ...errors import RequestRefused
from .completion import ChatReply
from .request_checks import read_json, refusal_of, tidy


def serve(handler: Any, api: API) -> None:
    """Answer a request to another API."""
    with handler.failures_told(api):
        handler.complete(_parsed(handler, api), api)


def count_tokens(handler: Any, api: API) -> None:
    """Answer how many tokens a request's prompt has, without the generation thread."""
    with handler.failures_told(api):
        handler.answer_json(200, {"input_tokens": handler.count_tokens(_parsed(handler, api))})


def _parsed(handler: Any, api: API) -> Request:
    try:
        body = tidy(read_json(handler))
    except RecursionError as error:
        raise RequestRefused(f"the body is no JSON that can be read: {error}") from error
    return api.parse(body, handler.headers)


def read_body(handler: Any) -> dict[str, Any]:
    """Read a request's JSON object, {} if it has no body; raises RequestRefused."""
    if handler.headers.get("Content-Length", "0") == "0":
        return {}
    return read_json(handler)


def answer(handler: Any, chat_body: dict[str, Any]) -> None:
    """Answer with the reply to a chat completion's body, or with its error."""
    with handler.failures_told(None):
        fields = tidy(chat_body)
        handler.complete(Request(fields, fields.get("stream", False), ChatReply(handler)), None)


def prefill(handler: Any, chat_body: dict[str, Any]) -> tuple[int, int]:
    """Compute a prompt, and one token; return the prompt's tokens, and how many were cached.

    Raises RequestRefused. Nothing is sent to the client.
    """
    reply = ChatReply(handler)
    request = Request({**tidy(chat_body), "max_tokens": 1}, False, reply)
    try:
        handler.complete(request, None, is_sent=False)
    except Exception as error:
        raise refusal_of(error, handler.timeout) from error
    finally:
        handler.completion = None
    return reply.n_prompt, reply.n_cached
