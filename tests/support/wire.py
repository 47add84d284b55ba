"""The message that the server's own handler sends to a client for ids that a test chose."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from mlx_lm import server

Message = dict[str, Any]
_READS_TEXT = "text_sm" in server.GenerationContext.__dataclass_fields__
"""From 0.32.0 the server finds markers in the text; 0.31.3 finds them in the ids."""


def sent_for(
    tokenizer: Any,
    prompt: Sequence[int],
    ids: Sequence[int],
    finish_reason: str = "stop",
    stop_words: Sequence[str] = (),
    tools: list[Any] | None = None,
) -> Message:
    """Return the message that a client puts together from a reply's stream.

    `ids` are all that the model produced, with its end token or stop word.
    """
    state = "normal"
    if tokenizer.has_thinking and tokenizer.rfind_think_start(
        list(prompt)
    ) > tokenizer.rfind_think_end(list(prompt)):
        state = "reasoning"
    host = SimpleNamespace(_state_machine_cache={})
    make = server.ResponseGenerator._make_state_machine
    names = {
        "has_tool_calling": tokenizer.has_tool_calling,
        "has_thinking": tokenizer.has_thinking,
        "tool_parser": tokenizer.tool_parser,
        "prompt": list(prompt),
    }
    if _READS_TEXT:
        _, machine = make(host, "model", tokenizer, list(stop_words))
        context = server.GenerationContext(**names, text_sm=machine, initial_state=state)
        responses = _responses(tokenizer, ids, finish_reason)
    else:
        machine, sequences = make(host, "model", tokenizer, list(stop_words), state)
        context = server.GenerationContext(**names, sequences=sequences)
        stream = _responses_by_ids(tokenizer, ids, finish_reason, machine)
        responses = server._process_control_tokens(context, stream)
    handler = _Handler(context, responses)
    server.APIHandler.handle_completion(handler, SimpleNamespace(tools=tools), list(stop_words))
    return handler.message()


def _responses(tokenizer: Any, ids: Sequence[int], finish_reason: str) -> Iterator[Any]:
    """Detokenize as the server's generation thread does, from 0.32.0 on."""
    detokenizer = tokenizer.detokenizer
    for n, token_id in enumerate(ids, start=1):
        finish = finish_reason if n == len(ids) else None
        if finish != "stop":
            detokenizer.add_token(token_id)
        if finish is not None:
            detokenizer.finalize()
        yield server.Response(detokenizer.last_segment, token_id, 0.0, finish, ())


def _responses_by_ids(
    tokenizer: Any, ids: Sequence[int], finish_reason: str, machine: Any
) -> Iterator[Any]:
    detokenizer, state = tokenizer.detokenizer, machine.make_state()
    for n, token_id in enumerate(ids, start=1):
        detokenizer.add_token(token_id)
        state, match, name = machine.match(state, token_id)
        finish = finish_reason if n == len(ids) else None
        yield server.Response(detokenizer.last_segment, token_id, name, match, 0.0, finish, ())


class _Handler(server.APIHandler):  # type: ignore[misc]
    """The server's handler without a socket. A setting that no test gives is None."""

    def __init__(self, context: Any, responses: Iterator[Any]) -> None:
        self.response_generator = SimpleNamespace(generate=lambda *a, **k: (context, responses))
        self.wfile = io.BytesIO()
        self.object_type = "chat.completion.chunk"
        self.stream = True
        self.logprobs, self.top_logprobs = False, 0

    def __getattr__(self, name: str) -> None:
        return None

    def _set_stream_headers(self, status_code: int = 200) -> None:
        assert status_code == 200

    def end_headers(self) -> None:
        return

    def message(self) -> Message:
        content, reasoning = "", ""
        calls: list[Any] = []
        for line in self.wfile.getvalue().decode().split("\n\n"):
            if line.startswith("data: {"):
                delta = json.loads(line.removeprefix("data: "))["choices"][0]["delta"]
                content += delta.get("content") or ""
                reasoning += delta.get("reasoning") or ""
                calls += delta.get("tool_calls") or []
        message: Message = {"role": "assistant", "content": content}
        if reasoning:
            message["reasoning"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return message
