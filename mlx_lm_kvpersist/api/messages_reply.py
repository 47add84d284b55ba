"""Replies of Anthropic's Messages API, from the chunks of a chat completion.

https://platform.claude.com/docs/en/build-with-claude/streaming has the events and their order.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any

from ..error_forms import anthropic_error
from .reply_parts import Event, Part, ReplyParts

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesReply(ReplyParts):
    """One reply. It returns the events for a client that streams."""

    def __init__(self, model: str, *, marks_cache: bool) -> None:
        super().__init__()
        self._marks_cache = marks_cache
        self._blocks: list[dict[str, Any]] = []
        self._message: dict[str, Any] = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": self._blocks,
            "stop_reason": None,
            "stop_sequence": None,
        }

    def begin(self, n_prompt: int, n_cached: int) -> list[Event]:
        message = {**self._message, "content": [], "usage": self._usage(n_prompt, n_cached, 0)}
        return [{"type": "message_start", "message": message}, *self.beat()]

    def end(
        self, finish_reason: str, stop_word: str | None, usage: Mapping[str, Any]
    ) -> list[Event]:
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
        events = list(self.close())
        self._message |= {**stopped, "usage": counts}
        events.append({"type": "message_delta", "delta": stopped, "usage": counts})
        events.append({"type": "message_stop"})
        return events

    def beat(self) -> list[Event]:
        return [{"type": "ping"}]

    def fail(self, status: int, message: str, code: str | None) -> list[Event]:
        return [anthropic_error(status, message)]

    def whole(self) -> dict[str, Any]:
        return self._message

    def _usage(self, n_prompt: int, n_cached: int, n_new: int) -> dict[str, int]:
        """Return the counts; their three parts of the prompt add up to it.

        Without `cache_control` in the request, `input_tokens` counts all computed tokens.
        """
        n_computed = n_prompt - n_cached
        return {
            "input_tokens": 0 if self._marks_cache else n_computed,
            "cache_creation_input_tokens": n_computed if self._marks_cache else 0,
            "cache_read_input_tokens": n_cached,
            "output_tokens": n_new,
        }

    def start_part(self, part: Part) -> Iterator[Event]:
        block: dict[str, Any] = {"type": part.kind, part.kind: ""}
        if part.kind == "thinking":
            block["signature"] = ""
        self._blocks.append(block)
        yield _start(part.index, block)

    def add_text(self, part: Part, text: str) -> Iterator[Event]:
        self._blocks[-1][part.kind] = part.text
        yield _delta(part.index, {"type": f"{part.kind}_delta", part.kind: text})

    def end_part(self, part: Part) -> Iterator[Event]:
        """End a block. Clients send thinking back only with a signature."""
        if part.kind == "thinking":
            digest = blake2b(part.text.encode("utf-8", "replace"), digest_size=16)
            signature = self._blocks[-1]["signature"] = digest.hexdigest()
            yield _delta(part.index, {"type": "signature_delta", "signature": signature})
        yield {"type": "content_block_stop", "index": part.index}

    def add_call(self, index: int, call_id: str, name: str, arguments: str) -> Iterator[Event]:
        block: dict[str, Any] = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
        yield _start(index, block)
        self._blocks.append({**block, "input": _arguments(arguments)})
        partial = json.dumps(self._blocks[-1]["input"], ensure_ascii=False)
        yield _delta(index, {"type": "input_json_delta", "partial_json": partial})
        yield {"type": "content_block_stop", "index": index}


def _start(index: int, block: dict[str, Any]) -> Event:
    return {"type": "content_block_start", "index": index, "content_block": dict(block)}


def _delta(index: int, delta: dict[str, Any]) -> Event:
    return {"type": "content_block_delta", "index": index, "delta": delta}


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
