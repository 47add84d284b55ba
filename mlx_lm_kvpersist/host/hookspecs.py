"""The hooks of the server, in the order in which a request meets them.

Every hook is optional. Plugins are asked in the order of the command line. A hook marked
`firstresult` stops at the first plugin that answers something other than None; without an answer
the stock server goes its own way. While requests are served, a plugin that raises is logged and
counts as one that did not answer: the plugins after it are still asked.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from email.message import Message
from typing import Any

import pluggy

from .prompt import PrefillLimits, Prepared, Prompt
from .routes import Route

PROJECT = "mlx_lm.server"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


@hookspec
def add_options(parser: ArgumentParser) -> None:
    """Add command line options, in an argument group of the plugin's own."""


@hookspec
def configure(args: Namespace) -> None:
    """Read the parsed options; raise ConfigError to stop the server with one line."""


@hookspec
def self_test() -> None:
    """Prove, before the server listens, that the plugin works; raise KVPersistError to stop it."""


@hookspec
def model_loaded(provider: Any) -> None:
    """The model provider has loaded a model. Generation thread."""


@hookspec(firstresult=True)
def make_prompt_cache(model: Any) -> list[Any] | None:
    """Return one cache per layer for a new sequence. Generation thread."""


@hookspec(firstresult=True)
def merge_caches(caches: Sequence[Any]) -> Any | None:
    """Return one batch cache for one layer's caches of several sequences. Generation thread."""


@hookspec(firstresult=True)
def batches(model: Any) -> bool | None:
    """Say whether sequences may be served together at all. Generation thread."""


@hookspec(firstresult=True)
def prefill_limits(model: Any) -> PrefillLimits | None:
    """Say how prompts are computed, one at a time and in chunks; else stock computes them.

    Generation thread.
    """


@hookspec
def request_received(request: Any, headers: Message, body: dict[str, Any]) -> None:
    """A request was parsed and is about to be queued; raise RequestRefused to refuse it.

    HTTP thread.
    """


@hookspec
def serving_changed(serving: bool) -> None:
    """Requests begin to be served where there were none, or none is any more. Generation thread."""


@hookspec
def prepare_messages(request: Any, args: Any, tokenizer: Any) -> None:
    """Change a request's messages in place before they are rendered.

    On the HTTP thread of a request for the loaded model, else on the generation thread.
    """


@hookspec(firstresult=True)
def prefetch(request: Any, args: Any, tokenizer: Any, prompt: Prompt) -> Callable[[], bool] | None:
    """Start to read what a waiting prompt needs; return what tells whether it is there.

    Called while other requests are served, before `take_request`. What it returns is called between
    their steps, and may do a part of the work there. Generation thread.
    """


@hookspec(firstresult=True)
def take_request(request: Any, args: Any, tokenizer: Any, prompt: Prompt) -> Prepared | None:
    """Take a request: return the prompt to feed and the caches that hold its first tokens.

    The plugin that takes a request is the only one whose `insert_cache` is called for it. Not
    called for prompts with images. Generation thread.
    """


@hookspec(firstresult=True)
def spell_prompt(request: Any, args: Any, tokenizer: Any, prompt: Prompt) -> Prompt | None:
    """Return the prompt that `take_request` would feed now, to count its tokens. HTTP thread."""


@hookspec
def insert_cache(handle: Any, tokens: list[int], prompt_cache: list[Any], cache_type: str) -> None:
    """Save the caches of a request that this plugin took; `handle` is its `Prepared.handle`.

    cache_type: "prefill" after a chunk of a prompt, where no part of it ends; "system" or "user" at
    the end of that part of the prompt, "assistant" at the end of the reply. Generation thread.
    """


@hookspec
def response_headers(request: Any) -> list[tuple[str, str]]:  # type: ignore[empty-body]
    """Return headers to add to the reply; a stream that has begun gets comments. HTTP thread."""


@hookspec
def reply_sent(
    request: Any, content: str, reasoning: str, tool_calls: list[dict[str, Any]]
) -> None:
    """The whole reply, as the client sees it, just before its last part is sent. HTTP thread."""


@hookspec
def reply_timed(request: Any, times_s: Sequence[float]) -> None:
    """A request has ended: when each token of its reply came, in seconds since it was queued.

    The reply can have been cut off, or not have begun.

    HTTP thread.
    """


@hookspec
def routes() -> list[Route]:  # type: ignore[empty-body]
    """Return HTTP routes to serve beside the stock ones."""


@hookspec
def shutdown() -> None:
    """The server stops: finish what is pending and close files. Main thread."""
