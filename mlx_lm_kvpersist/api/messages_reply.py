"""Replies of Anthropic's Messages API, from the chunks of a chat completion.

https://platform.claude.com/docs/en/build-with-claude/streaming has the events and their order.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any

Events = list[dict[str, Any]]

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


def error_event(status: int, message: str) -> dict[str, Any]:
    """Return an error, as the body of a reply or as an event in a stream."""
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}}


class MessagesReply:
    """One reply. The events that it returns are what a client that streams is to be sent.

    White space alone makes no block: clients drop such a block and would send back another reply
    than they were sent.
    """

    def __init__(self, model: str, *, marks_cache: bool) -> None:
        self._marks_cache = marks_cache
        self._blocks: list[dict[str, Any]] = []
        self._is_open = False
        self._held = ("", "")
        """The kind of a block that has white space only so far, and that white space."""
        self._message: dict[str, Any] = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    @property
    def content(self) -> str:
        """The text that the client was shown so far."""
        return "".join(block["text"] for block in self._blocks if block["type"] == "text")

    def begin(self, n_prompt: int, n_cached: int) -> Events:
        usage = self._usage(n_prompt, n_cached, 0)
        return [{"type": "message_start", "message": {**self._message, "usage": usage}}]

    def add(self, delta: Mapping[str, Any]) -> Events:
        events: Events = []
        for kind, key in (("thinking", "reasoning"), ("text", "content")):
            if delta.get(key):
                events += self._add_text(kind, delta[key])
        for call in delta.get("tool_calls") or ():
            events += self._add_call(call)
        return events

    def end(self, finish_reason: str, stop_word: str | None, usage: Mapping[str, Any]) -> Events:
        reason = _STOP_REASONS.get(finish_reason, "end_turn")
        if reason == "tool_use" and all(block["type"] != "tool_use" for block in self._blocks):
            reason = "end_turn"  # no call could be read
        elif reason == "end_turn" and stop_word is not None:
            reason = "stop_sequence"
        stopped = {
            "stop_reason": reason,
            "stop_sequence": stop_word if reason == "stop_sequence" else None,
        }
        n_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        counts = self._usage(usage["prompt_tokens"], n_cached, usage["completion_tokens"])
        events = list(self._close())
        self._message |= {"content": self._blocks, **stopped, "usage": counts}
        events.append({"type": "message_delta", "delta": stopped, "usage": counts})
        events.append({"type": "message_stop"})
        return events

    def beat(self) -> Events:
        return [{"type": "ping"}]

    def fail(self, status: int, message: str) -> Events:
        return [error_event(status, message)]

    def whole(self) -> dict[str, Any]:
        return self._message

    def _usage(self, n_prompt: int, n_cached: int, n_new: int) -> dict[str, int]:
        """Return the counts; their three parts of the prompt add up to it.

        A client that marks nothing with `cache_control` counts `input_tokens` as what was computed.
        """
        n_computed = n_prompt - n_cached
        return {
            "input_tokens": 0 if self._marks_cache else n_computed,
            "cache_creation_input_tokens": n_computed if self._marks_cache else 0,
            "cache_read_input_tokens": n_cached,
            "output_tokens": n_new,
        }

    def _add_text(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        if not (self._is_open and self._blocks[-1]["type"] == kind):
            held_kind, held = self._held
            text = held + text if held_kind == kind else text
            if not text.strip():
                self._held = (kind, text)
                return
            start = {"type": kind, kind: ""}
            yield from self._open(start | ({"signature": ""} if kind == "thinking" else {}))
        self._blocks[-1][kind] += text
        yield self._delta({"type": f"{kind}_delta", kind: text})

    def _add_call(self, call: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        given = _arguments(call["function"]["arguments"])
        name = call["function"]["name"]
        yield from self._open({"type": "tool_use", "id": call["id"], "name": name, "input": {}})
        self._blocks[-1]["input"] = given
        yield self._delta({"type": "input_json_delta", "partial_json": json.dumps(given)})
        yield from self._close()

    def _open(self, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield from self._close()
        self._held = ("", "")
        self._is_open = True
        self._blocks.append(block)
        index = len(self._blocks) - 1
        yield {"type": "content_block_start", "index": index, "content_block": dict(block)}

    def _delta(self, delta: dict[str, Any]) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _close(self) -> Iterator[dict[str, Any]]:
        """End the open block. Clients send thinking back only with a signature."""
        if not self._is_open:
            return
        block = self._blocks[-1]
        if block["type"] == "thinking":
            digest = blake2b(block["thinking"].encode("utf-8", "replace"), digest_size=16)
            block["signature"] = digest.hexdigest()
            yield self._delta({"type": "signature_delta", "signature": block["signature"]})
        self._is_open = False
        yield {"type": "content_block_stop", "index": len(self._blocks) - 1}


def _arguments(text: str) -> dict[str, Any]:
    """Return a call's arguments as the object that the API wants."""
    given = json.loads(text)
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            pass
    if isinstance(given, dict):
        return given
    return {} if given is None else {"arguments": given}
