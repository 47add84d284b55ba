"""Sends a reply from mlx-lm's loop to its client, in the form of the client's API.

Clients and proxies give up if nothing comes while a request waits. So a stream gets its headers
early, and keepalives.
"""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from ...apis import API, Event, Usage, openai_error
from .. import manager
from ..hooks import ClientRequest, frozen

_MARKS = ("think_start", "think_end", "tool_call_start", "tool_call_end")
"""Attributes of mlx-lm's tokenizer: the marks around reasoning and around tool calls."""


class Completion:
    """One reply. HTTP thread; `keepalive` runs on the clients' thread.

    api: None for mlx-lm's own API, whose errors have OpenAI's form. reply: the `ReplyFormat`; None
    for a path that this package does not know: mlx-lm then sends the reply.
    """

    request: Any = None
    is_sent = True
    doing = "waiting"
    """The server's current work, as shown to the reader of a stream."""

    def __init__(
        self,
        handler: Any,
        api: API | None,
        reply: Any = None,
        streams: bool = False,
        tools: Sequence[dict[str, Any]] | None = None,
    ) -> None:
        self._handler, self._client = handler, handler.client
        self._api, self.reply, self._tools = api, reply, tools
        self.stop_words = self.marks = StopWords(())
        """`marks`: stop words with a mark, such as "</think>". They are searched in the tokens,
        because mlx-lm removes marks from the text."""
        self.streams = streams
        self._context: Any = None
        self._is_open = False
        """Whether headers were sent."""
        self._early_headers: list[tuple[str, str]] = []
        """The plugins' headers for a stream that begins while its request waits."""
        self.reasoning: list[str] = []
        self.tool_calls: list[dict[str, Any]] = []
        self.finish_reason = "stop"
        self.usage = Usage(0, 0, 0, 0)
        self.tokens: list[Any] = []
        """mlx-lm's responses, for the log probabilities in a reply that is not a stream."""
        self._n_read = self._n_added = self._n_reasoning = 0
        """The numbers of tokens: read, read before the last `add`, and in reasoning."""
        self._unread = ""
        """The text of invalid tool calls."""
        self._has_ended = False
        """Whether all tokens of the reply were read."""

    def received(self, request: Any) -> None:
        self.request = request
        if self.streams:
            # Asked for here, because the clients' thread must not wait for a plugin.
            self._early_headers = self.plugin_headers(is_early=True)
            self._client.begin_keepalives(self.keepalive)

    def plugin_headers(self, *, is_early: bool = False) -> list[tuple[str, str]]:
        seen = ClientRequest.of(self.request)
        return list(chain(*manager.ask("response_headers", request=seen, is_early=is_early)))

    def responses(self, context: Any, responses: Iterable[Any]) -> Iterator[Any]:
        """Return the reply's tokens, up to a stop word in their text."""
        self._context = context
        if self._api is not None and context.tool_parser is not None:
            context.tool_parser = partial(self._parse_call, context.tool_parser)
        return self._read(responses)

    def _read(self, responses: Iterable[Any]) -> Iterator[Any]:
        words, state = self.stop_words.words, None
        if words:
            tokenizer = self._handler.generator.model_provider.tokenizer
            marks = [mark for name in _MARKS if (mark := getattr(tokenizer, name, None))]
            self.marks = StopWords(word for word in words if any(mark in word for mark in marks))
        for response in responses:
            self._n_read += 1
            if not self.streams:
                self.tokens.append(response)
            if words:  # mlx-lm 0.31.3 has a mark's ids, but not its text
                match = getattr(response, "match", None)
                self.marks.cut(tokenizer.decode(match) if match else response.text)
            if getattr(response, "state", "") is None:
                # In 0.31.3 the last response has no state: stock would drop a cut-off tool call.
                response = replace(response, state=state)
            state = getattr(response, "state", None)
            yield response
            if self._stop_word is not None:  # stock then ends the reply here
                self._context.stop()
                break
        self._has_ended = True

    def _parse_call(self, parse: Callable[..., Any], text: str, shown: Any) -> Any:
        """Parse a call, also of a tool with `defer_loading`. Save invalid text: mlx-lm drops it."""
        try:
            if self._tools is None:
                raise ValueError("no call is wanted")
            return parse(text, self._tools or None)
        except ValueError:
            tokenizer = self._handler.generator.model_provider.tokenizer
            # After the last token stock parses a call that was cut off: it has no end mark.
            end = "" if self._has_ended else tokenizer.tool_call_end or ""
            self._unread += f"{tokenizer.tool_call_start}{text}{end}"
            raise

    @property
    def _stop_word(self) -> str | None:
        return self.stop_words.found or self.marks.found

    def begin(self, head: bytes) -> None:
        lines = [f"{name}: {text}" for name, text in self.plugin_headers()]
        self.doing = "prefill"
        with self._client.lock:
            if self._is_open:  # too late for headers: people who read the stream see comments
                self._client.write("".join(f": {line}\n\n" for line in lines).encode())
                return
            self._is_open = True
            self._client.write(head + "\r\n".join([*lines, "\r\n"]).encode())
            n_prompt, n_cached = len(self._context.prompt), self._context.prompt_cache_count
            self._send(self.reply.begin(n_prompt, max(0, n_cached)))

    def show_progress(self, n_done: int, n_all: int) -> None:
        """Send the progress as comments to streams of mlx-lm's API, as mlx-lm does."""
        self.doing = f"prefill {n_done:,} of {n_all:,}"
        if self._api is None and self.streams:
            self._client.write(f": keepalive {n_done}/{n_all}\n\n".encode())

    def add(
        self, text: str, reasoning: str, tool_calls: list[dict[str, Any]], finish_reason: str | None
    ) -> None:
        """Send a part of the reply. The last part is saved for `end`."""
        text = self.stop_words.cut(text)
        if finish_reason or tool_calls or reasoning:
            text += self.stop_words.rest()
        if finish_reason == "length" and self._stop_word is not None:
            finish_reason = "stop"
        text, self._unread = text + self._unread, ""
        self.doing = "generating"
        if reasoning:
            self.reasoning.append(reasoning)
            self._n_reasoning += self._n_read - self._n_added
        self._n_added = self._n_read
        self.tool_calls += tool_calls
        if finish_reason is not None:
            self.finish_reason, self._last = finish_reason, (text, reasoning, tool_calls)
            return
        with self._client.lock:
            self._send(self.reply.add(text, reasoning, tool_calls))

    def end(self, n_prompt: int, n_new: int, n_cached: int) -> None:
        """End the reply. Plugins see it before its last part is sent."""
        with self._client.lock:
            self._client.end_keepalives()
            events = self.reply.add(*self._last)
            self.usage = Usage(n_prompt, max(0, n_cached), n_new, self._n_reasoning)
            events += self.reply.end(self.finish_reason, self._stop_word, self.usage)
        manager.ask(
            "reply_sent",
            request=ClientRequest.of(self.request),
            content=self.reply.content,
            reasoning="".join(self.reasoning),
            tool_calls=frozen(self.tool_calls),
        )
        if self.streams:
            done = b"data: [DONE]\n\n" if self._api is None else b""
            self._client.write(_encoded(events) + done)

    def fail(self, status: int, message: str, code: str | None) -> None:
        """Tell the client why the reply is missing or ends early. mlx-lm would send nothing."""
        with self._client.lock:
            self._client.end_keepalives()
            in_stream = self._api is not None and self._api.refuses_in_stream
            if in_stream and self.streams and status == 400 and code and not self._is_open:
                self._client.write(self._early_head())
                self._is_open = True
            if self._is_open:
                self._send(self.reply.fail(status, message, code))
                return
        error = self._api.error if self._api is not None else openai_error
        self._handler.answer_json(status, error(status, message, code))

    def keepalive(self) -> bytes:
        """Return a comment, and events for clients that ignore comments."""
        head = b"" if self._is_open else self._early_head()
        events = _encoded(self.reply.wait())
        self._is_open = True
        return head + f": {self.doing}\n".encode() + (events or b"\n")

    def _early_head(self) -> bytes:
        """Return the bytes that begin a stream whose request still waits. Called once."""
        inner, written = copy.copy(self._handler), io.BytesIO()
        inner.completion, inner.wfile, inner._headers_buffer = None, written, []
        inner.log_request = lambda *args: None  # logged later, when stock writes its headers
        inner._set_stream_headers(200)
        for name, value in self._early_headers:
            inner.send_header(name, value)
        inner.end_headers()
        return written.getvalue() + _encoded(self.reply.begin(0, 0))

    def _send(self, events: list[Event]) -> None:
        if events and self.streams:
            self._client.write(_encoded(events))


class ObservedGenerator:
    """Shows a request to plugins, and its progress to the Completion. HTTP thread."""

    def __init__(self, handler: Any, generator: Any) -> None:
        self._handler, self._generator = handler, generator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    def generate(
        self,
        request: Any,
        args: Any,
        progress_callback: Callable[[int, int], None] = lambda n_done, n_all: None,
    ) -> tuple[Any, Iterator[Any]]:
        handler = self._handler
        completion = handler.completion = handler.completion or Completion(handler, None)

        def on_progress(n_done: int, n_all: int) -> None:
            completion.show_progress(n_done, n_all)
            progress_callback(n_done, n_all)

        handler.receive(request)
        context, responses = self._generator.generate(request, args, progress_callback=on_progress)
        return context, completion.responses(context, responses)


def _encoded(events: Iterable[Event]) -> bytes:
    text = ""
    for event in events:
        name = f"event: {event['type']}\n" if "type" in event else ""
        text += f"{name}data: {json.dumps(event)}\n\n"
    return text.encode()


class ChatReply:
    """One reply. mlx-lm's handler makes each chunk of a stream, or the whole reply.

    handler: has the Completion and, like mlx-lm's handler, the request's parameters.
    """

    def __init__(self, handler: Any) -> None:
        self._handler = handler
        self._texts: list[str] = []
        self._last_chunk: dict[str, Any] = {}

    @property
    def content(self) -> str:
        return "".join(self._texts)

    def begin(self, n_prompt: int, n_cached: int) -> list[Event]:
        return []

    def add(self, text: str, reasoning: str, tool_calls: list[dict[str, Any]]) -> list[Event]:
        self._texts.append(text)
        make = self._handler.stock_response
        chunk = make(text, None, tool_calls=tool_calls, reasoning_text=reasoning)
        self._last_chunk = _with_reasoning(chunk)
        return [self._last_chunk]

    def end(self, finish_reason: str, stop_word: str | None, usage: Usage) -> list[Event]:
        self._last_chunk["choices"][0]["finish_reason"] = finish_reason  # not sent yet
        options = self._handler.body.get("stream_options")
        if not isinstance(options, dict) or not options.get("include_usage"):
            return []
        return [self._handler.stock_usage(usage.n_prompt, usage.n_new, usage.n_cached)]

    def wait(self) -> list[Event]:
        return []

    def fail(self, status: int, message: str, code: str | None) -> list[Event]:
        return [openai_error(status, message, code)]

    def whole(self) -> dict[str, Any]:
        handler, completion = self._handler, self._handler.completion
        tokens, usage = completion.tokens, completion.usage
        for call in completion.tool_calls:
            del call["index"]  # only chunks have it
        handler.stream = False
        response = handler.stock_response(
            self.content,
            completion.finish_reason,
            *(usage.n_prompt, usage.n_new, usage.n_cached),
            token_logprobs=[token.logprob for token in tokens] if handler.logprobs else [],
            top_tokens=[token.top_tokens for token in tokens] if handler.top_logprobs > 0 else [],
            tokens=[token.token for token in tokens],
            tool_calls=completion.tool_calls,
            reasoning_text="".join(completion.reasoning),
        )
        return _with_reasoning(response)


def _with_reasoning(response: dict[str, Any]) -> dict[str, Any]:
    """Give a reply's reasoning a second name, because many clients read only that name."""
    choice = response["choices"][0]
    message = choice.get("delta") or choice.get("message") or {}  # a text completion has neither
    if message.get("reasoning"):
        message["reasoning_content"] = message["reasoning"]
    return response


class StopWords:
    """Cuts a text, which arrives in pieces, at the first complete stop word.

    Text that may be the beginning of a stop word waits for the next text.
    """

    found: str | None = None

    def __init__(self, words: Iterable[str]) -> None:
        # If several words end at the same place, the text is cut where the longest begins.
        self.words = sorted(filter(None, words), key=len, reverse=True)
        self._held = ""

    def cut(self, piece: str) -> str:
        """Return the text that can be shown now; nothing after a stop word."""
        if self.found is not None:
            return ""
        text = self._held + piece
        ends = {word: at + len(word) for word in self.words if (at := text.find(word)) >= 0}
        if ends:
            self.found = min(ends, key=ends.__getitem__)
            self._held = ""
            return text[: ends[self.found] - len(self.found)]
        n_held = max((_n_begun(text, word) for word in self.words), default=0)
        shown, self._held = text[: len(text) - n_held], text[len(text) - n_held :]
        return shown

    def rest(self) -> str:
        """Return the waiting text. Called when no later text can complete a stop word."""
        rest, self._held = self._held, ""
        return rest


def _n_begun(text: str, word: str) -> int:
    """Return how many characters at the end of a text are the beginning of a word."""
    longest = range(min(len(word) - 1, len(text)), 0, -1)
    return next((n for n in longest if word.startswith(text[-n:])), 0)
