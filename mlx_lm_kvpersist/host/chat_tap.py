"""What stands between stock's handler and its response generator while it serves another API."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ..errors import RequestRefused


class Tap:
    """The server's response generator, as one request sees it: remembers how its prompt went.

    tools: those that may be called. None: every call is told as the text that it is.
    """

    def __init__(self, generator: Any, tools: list[dict[str, Any]] | None) -> None:
        self._generator, self._tools = generator, tools
        self._context: Any = None
        self.stop_word: str | None = None
        self._unread: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    @property
    def n_prompt(self) -> int:
        return len(self._context.prompt) if self._context is not None else 0

    @property
    def n_cached(self) -> int:
        return max(0, self._context.prompt_cache_count) if self._context is not None else 0

    def generate(
        self, request: Any, args: Any, progress_callback: Callable[[int, int], None] | None = None
    ) -> tuple[Any, Iterator[Any]]:
        context, responses = self._generator.generate(
            request, args, progress_callback=progress_callback
        )
        self._context = context
        if context.tool_parser is not None:
            context.tool_parser = self._reading_calls(context.tool_parser)
        if args.stop_words:
            # Once the reply has been computed, another model may take this one's place.
            responses = self._watched(responses, args.stop_words, self.model_provider.tokenizer)
        return context, responses

    def _reading_calls(self, parse: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
        """Let the parser know deferred tools, and keep what it cannot read: stock drops that."""
        tokenizer = self.model_provider.tokenizer

        def read(text: str, tools: Any) -> Any:
            try:
                if self._tools is None:
                    raise ValueError("no call is wanted")
                return parse(text, self._tools or None)
            except ValueError:
                end = tokenizer.tool_call_end or ""
                self._unread.append(f"{tokenizer.tool_call_start}{text}{end}")
                raise

        return read

    def unread_calls(self) -> str:
        """Return the text of calls that could not be read since this was last asked."""
        text = "".join(self._unread)
        self._unread.clear()
        return text

    def _watched(
        self, responses: Iterator[Any], stop_words: list[str], tokenizer: Any
    ) -> Iterator[Any]:
        """Pass the tokens on; note which stop word ended them."""
        ids: list[int] = []
        for response in responses:
            ids.append(response.token)
            if response.finish_reason == "stop":
                self.stop_word = stop_word_of(ids, stop_words, tokenizer)
            yield response


def stop_word_of(ids: list[int], stop_words: list[str], tokenizer: Any) -> str | None:
    """Return the stop word whose tokens end a reply, as stock compares them."""
    if ids[-1] in tokenizer.eos_token_ids:
        return None
    spelled = {word: tokenizer.encode(word, add_special_tokens=False) for word in stop_words}
    found = [word for word, own in spelled.items() if own and ids[-len(own) :] == own]
    return max(found, key=len, default=None)


class Counter:
    """Stands where a request's response generator stands, and counts its prompt instead."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        self.n_tokens: int | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    def generate(self, request: Any, args: Any, progress_callback: Any = None) -> Any:
        self.n_tokens = self._generator.count_tokens(request, args)
        raise RequestRefused("counted, not generated")
