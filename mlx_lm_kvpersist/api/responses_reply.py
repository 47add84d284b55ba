"""Replies of OpenAI's Responses API, from the chunks of a chat completion.

https://platform.openai.com/docs/api-reference/responses-streaming has the events and their order.
"""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from .reply_parts import Event, Part, ReplyParts

REASONING_PREFIX = "kvpersist:"
"""Begins `encrypted_content`; base64 of the reasoning follows."""
_ENCRYPTED = "reasoning.encrypted_content"
_ECHOED: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "prompt_cache_key": None,
    "reasoning": None,
    "temperature": None,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": None,
    "truncation": "disabled",
    "user": None,
}
"""Fields that a reply repeats from its request, with their defaults."""


class ResponsesReply(ReplyParts):
    """One reply. It returns the events for a client that streams.

    names: by the name that the model knows a tool by, its namespace and its name in the request.
    """

    def __init__(
        self, body: Mapping[str, Any], names: Mapping[str, tuple[str, str]], *, is_kept: bool
    ) -> None:
        super().__init__()
        self._names, self._is_kept = names, is_kept
        include = body.get("include")
        self._encrypts = isinstance(include, list) and _ENCRYPTED in include
        self._n_events = self._n_thoughts = 0
        self._output: list[dict[str, Any]] = []
        echoed = {name: body.get(name) for name in _ECHOED}
        self._response: dict[str, Any] = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "model": body.get("model", "default_model"),
            "previous_response_id": None,
            "store": False,
            "usage": None,
            **{name: _ECHOED[name] if one is None else one for name, one in echoed.items()},
        }

    def begin(self, n_prompt: int, n_cached: int) -> list[Event]:
        return [self._lifecycle("created"), self._lifecycle("in_progress")]

    def end(
        self, finish_reason: str, stop_word: str | None, usage: Mapping[str, Any]
    ) -> list[Event]:
        events = list(self.close())
        n_prompt, n_new = usage["prompt_tokens"], usage["completion_tokens"]
        n_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        self._response["usage"] = {
            "input_tokens": n_prompt,
            "input_tokens_details": {
                "cached_tokens": n_cached,
                "cache_write_tokens": n_prompt - n_cached if self._is_kept else 0,
            },
            "output_tokens": n_new,
            "output_tokens_details": {"reasoning_tokens": min(self._n_thoughts, n_new)},
            "total_tokens": n_prompt + n_new,
        }
        status = "completed"
        if finish_reason == "length":
            status = "incomplete"
            self._response["incomplete_details"] = {"reason": "max_output_tokens"}
        self._response["status"] = status
        return [*events, self._lifecycle(status)]

    def beat(self) -> list[Event]:
        return [self._lifecycle("in_progress")]

    def fail(self, status: int, message: str, code: str | None) -> list[Event]:
        code = code or ("server_error" if status >= 500 else "invalid_prompt")
        self._response |= {"status": "failed", "error": {"code": code, "message": message}}
        return [self._lifecycle("failed")]

    def whole(self) -> dict[str, Any]:
        return {**self._response, "output": self._output}

    def add(self, text: str, reasoning: str, tool_calls: list[dict[str, Any]]) -> list[Event]:
        self._n_thoughts += bool(reasoning)  # a part is a token
        return super().add(text, reasoning, tool_calls)

    def start_part(self, part: Part) -> Iterator[Event]:
        if part.kind == "thinking":
            item: dict[str, Any] = {"id": _id("rs"), "type": "reasoning", "summary": []}
        else:
            item = {"id": _id("msg"), "type": "message", "role": "assistant"}
        self._output.append({**item, "status": "in_progress", "content": []})
        yield self._item_event("added", part.index)
        yield self._of_part("content_part.added", part, part=_content(part.kind, ""))

    def add_text(self, part: Part, text: str) -> Iterator[Event]:
        yield self._of_part(f"{_name(part)}.delta", part, delta=text, **_logprobs(part))

    def end_part(self, part: Part) -> Iterator[Event]:
        content = _content(part.kind, part.text)
        yield self._of_part(f"{_name(part)}.done", part, text=part.text, **_logprobs(part))
        yield self._of_part("content_part.done", part, part=content)
        item = self._output[part.index]
        item |= {"status": "completed", "content": [content]}
        if part.kind == "thinking" and self._encrypts:
            encoded = base64.b64encode(part.text.encode("utf-8", "replace")).decode()
            item["encrypted_content"] = REASONING_PREFIX + encoded
        yield self._item_event("done", part.index)

    def add_call(self, index: int, call_id: str, name: str, arguments: str) -> Iterator[Event]:
        namespace, own = self._names.get(name, ("", name))
        item: dict[str, Any] = {"id": _id("fc"), "type": "function_call", "status": "in_progress"}
        item |= {"call_id": call_id, "name": own, "arguments": ""}
        if namespace:
            item["namespace"] = namespace
        self._output.append(item)
        yield self._item_event("added", index)
        place = {"item_id": item["id"], "output_index": index}
        yield self._event("function_call_arguments.delta", **place, delta=arguments)
        yield self._event("function_call_arguments.done", **place, arguments=arguments, name=own)
        self._output[index] = {**item, "status": "completed", "arguments": arguments}
        yield self._item_event("done", index)

    def _event(self, event: str, /, **fields: Any) -> Event:
        self._n_events += 1
        return {"type": f"response.{event}", "sequence_number": self._n_events - 1, **fields}

    def _lifecycle(self, name: str) -> Event:
        done = [item for item in self._output if item["status"] == "completed"]
        return self._event(name, response={**self._response, "output": done})

    def _item_event(self, name: str, index: int) -> Event:
        item = dict(self._output[index])
        return self._event(f"output_item.{name}", output_index=index, item=item)

    def _of_part(self, name: str, of: Part, /, **fields: Any) -> Event:
        place = {"item_id": self._output[of.index]["id"], "output_index": of.index}
        return self._event(name, **place, content_index=0, **fields)


def _id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


def _name(part: Part) -> str:
    return "reasoning_text" if part.kind == "thinking" else "output_text"


def _logprobs(part: Part) -> dict[str, Any]:
    return {} if part.kind == "thinking" else {"logprobs": []}


def _content(kind: str, text: str) -> dict[str, Any]:
    if kind == "thinking":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": []}
