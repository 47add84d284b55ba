"""A chat completion on its way to a client of another API, and completions without a client."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ...errors import RequestRefused
from ..http import completion_output
from ..http.completion_output import CompletionOutput

if TYPE_CHECKING:
    from .chat_api import ChatAPI, Events, ReplyTranslation


class TranslatedOutput(CompletionOutput):
    """Sends a chat completion in the form of another API, as that API's events or as one object.

    Stock's handler always streams; the bytes that it writes are dropped. A reply may make its
    events on the HTTP thread and on that of the beats, so it is asked with the lock held.
    """

    is_translated = True
    reply: ReplyTranslation
    tools: list[dict[str, Any]] | None = None
    """Those that may be called, for the parser of calls. None: every call is text."""

    def __init__(self, handler: Any, api: ChatAPI | None) -> None:
        super().__init__(handler)
        self._api = api
        self._context: Any = None
        self._unread: list[str] = []
        """The text of calls that could not be read."""

    def write(self, written: bytes) -> int:
        return len(written)

    def read_calls(self, context: Any, provider: Any) -> None:
        """Let the parser of calls know deferred tools, and keep text that stock would drop.

        context: stock's, of the reply that begins.
        """
        self._context, parse = context, context.tool_parser
        if parse is not None:
            context.tool_parser = self._reading(parse, provider.tokenizer)

    def _reading(self, parse: Callable[[str, Any], Any], tokenizer: Any) -> Callable[..., Any]:
        def read(text: str, tools: Any) -> Any:
            try:
                if self.tools is None:
                    raise ValueError("no call is wanted")
                return parse(text, self.tools or None)
            except ValueError:
                end = tokenizer.tool_call_end or ""
                self._unread.append(f"{tokenizer.tool_call_start}{text}{end}")
                raise

        return read

    def begin(self, head: bytes, headers: Iterable[tuple[str, str]]) -> None:
        was_open = self._is_open
        super().begin(head, headers)
        if not was_open:
            n_prompt, n_cached = len(self._context.prompt), self._context.prompt_cache_count
            with self._lock:
                self._send(self.reply.begin(n_prompt, max(0, n_cached)))

    @property
    def content(self) -> str:
        """The text that was sent so far."""
        return self.reply.content

    def add(self, text: str, reasoning: str, tool_calls: list[dict[str, Any]]) -> None:
        """Send a part of the reply."""
        if self._unread:
            text += "".join(self._unread)
            self._unread.clear()
        with self._lock:
            self._send(self.reply.add(text, reasoning, tool_calls))

    def end(self, finish_reason: str, stop_word: str | None, usage: dict[str, Any]) -> None:
        """Send the end of the reply. `usage` is a chat completion's."""
        with self._lock:
            self._send(self.reply.end(finish_reason, stop_word, usage))

    def finish(self, handler: Any) -> None:
        """Send the whole reply to a client that does not stream."""
        handler.answer_json(200, self.reply.whole())

    def _refuse(self, status: int, message: str, code: str | None) -> None:
        assert self._api is not None
        in_stream = code and status == 400 and self._api.refuses_in_stream and self.streams
        if in_stream and not self._is_open:
            self._is_open = True
            self._client.write(self._early_head())
        if self._is_open:
            self._send(self.reply.fail(status, message, code))
        else:
            self._handler.answer_json(status, self._api.error(status, message, code))

    def _early_head(self) -> bytes:
        return super()._early_head() + _as_bytes(self.reply.begin(0, 0))

    def _sign_of_life(self) -> bytes:
        """Return a comment, and an event for clients that do not count a comment."""
        return f": {self.doing}\n".encode() + _as_bytes(self.reply.beat())

    def _send(self, events: Events) -> None:
        if events and self.streams:
            self._due_s = time.monotonic() + completion_output.BEAT_S
            self._client.write(_as_bytes(events))


class HiddenOutput(TranslatedOutput):
    """A completion of which nothing is sent. Raises RequestRefused for an error."""

    def __init__(self, handler: Any) -> None:
        super().__init__(handler, None)
        self.usage: dict[str, Any] = {}
        """The chat completion's, at its end."""

    content = ""

    def read_calls(self, context: Any, provider: Any) -> None: ...

    def add(self, text: str, reasoning: str, tool_calls: list[dict[str, Any]]) -> None: ...

    def end(self, finish_reason: str, stop_word: str | None, usage: dict[str, Any]) -> None:
        self.usage = usage

    def finish(self, handler: Any) -> None: ...

    def fail(self, error: Exception) -> None:
        status, code = getattr(error, "status", 500), getattr(error, "code", None)
        raise RequestRefused(str(error), status, code) from error


def _as_bytes(events: Events) -> bytes:
    written = (f"event: {one['type']}\ndata: {json.dumps(one)}\n\n" for one in events)
    return "".join(written).encode()
