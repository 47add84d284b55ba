"""Errors in the forms that clients of OpenAI and of Anthropic read, and what such a form says."""

from __future__ import annotations

import json
from typing import Any

_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def openai_error(status: int, message: str, code: str | None = None) -> dict[str, Any]:
    """Return the body of an error in OpenAI's form, which our own routes have, too."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


def anthropic_error(status: int, message: str) -> dict[str, Any]:
    """Return an error in Anthropic's form: the body of a reply, or an event in a stream."""
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


def message_of(body: bytes) -> str:
    """Return what an error's body says, in any of the forms of the APIs; "" for anything else."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return ""
