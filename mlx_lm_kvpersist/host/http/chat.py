"""A reply in stock's own form: a chat completion, or a completion of a text."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from ...apis import Event
from ...error_forms import openai_error


class ChatReply:
    """One reply. Stock's handler makes each chunk, and the whole reply for other clients.

    handler: has the request's parameters as attributes, as stock's own handler.
    """

    def __init__(self, handler: Any) -> None:
        self._handler = handler
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[dict[str, Any]] = []
        self._tokens: list[Any] = []
        """Stock's responses, which the whole reply tells the log probabilities of."""
        self._last_chunk: dict[str, Any] = {}
        self.n_prompt = self.n_cached = self._n_new = 0

    @property
    def content(self) -> str:
        return "".join(self._texts)

    def keep_tokens(self, responses: Iterable[Any]) -> Iterator[Any]:
        for response in responses:
            self._tokens.append(response)
            yield response

    def begin(self, n_prompt: int, n_cached: int) -> list[Event]:
        return []

    def add(self, text: str, reasoning: str, tool_calls: list[dict[str, Any]]) -> list[Event]:
        self._texts.append(text)
        self._reasoning.append(reasoning)
        self._calls += tool_calls
        parts = {"tool_calls": tool_calls, "reasoning_text": reasoning}
        self._last_chunk = _with_reasoning(self._handler.stock_response(text, None, **parts))
        return [self._last_chunk]

    def end(
        self, finish_reason: str, stop_word: str | None, n_prompt: int, n_cached: int, n_new: int
    ) -> list[Event]:
        self._last_chunk["choices"][0]["finish_reason"] = finish_reason  # it is not sent yet
        self.n_prompt, self.n_cached, self._n_new = n_prompt, n_cached, n_new
        options = self._handler.body.get("stream_options")
        if not isinstance(options, dict) or not options.get("include_usage"):
            return []
        return [self._handler.stock_usage(n_prompt, n_new, n_cached)]

    def wait(self) -> list[Event]:
        return []

    def fail(self, status: int, message: str, code: str | None) -> list[Event]:
        return [openai_error(status, message, code)]

    def whole(self) -> dict[str, Any]:
        handler, tokens = self._handler, self._tokens
        for call in self._calls:
            del call["index"]  # only chunks have one
        handler.stream = False
        response = handler.stock_response(
            self.content,
            self._last_chunk["choices"][0]["finish_reason"],
            *(self.n_prompt, self._n_new, self.n_cached),
            token_logprobs=[token.logprob for token in tokens] if handler.logprobs else [],
            top_tokens=[token.top_tokens for token in tokens] if handler.top_logprobs > 0 else [],
            tokens=[token.token for token in tokens],
            tool_calls=self._calls,
            reasoning_text="".join(self._reasoning),
        )
        return _with_reasoning(response)


def _with_reasoning(response: dict[str, Any]) -> dict[str, Any]:
    """Give a reply's reasoning a second name, which half of the clients read."""
    choice = response["choices"][0]
    message = choice.get("delta") or choice.get("message") or {}  # a text completion has neither
    if message.get("reasoning"):
        message["reasoning_content"] = message["reasoning"]
    return response
