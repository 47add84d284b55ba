"""The hooks of the server: what a plugin may answer, in the order of a request.

Every hook is optional. Hooks marked `firstresult` stop at the first plugin that
returns something other than None; when none does, the stock server's own way is used.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from email.message import Message
from typing import Any

import pluggy

from .prompt import Prompt
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
def joins_prompts(model: Any) -> bool | None:
    """Say whether prompts of unequal length may be computed together. Generation thread."""


@hookspec
def request_received(request: Any, headers: Message, body: dict[str, Any]) -> None:
    """A request was parsed and is about to be queued. HTTP thread."""


@hookspec
def serving_changed(serving: bool) -> None:
    """Requests begin to be served where there were none, or none is any more. Generation thread."""


@hookspec
def prepare_messages(request: Any, args: Any, tokenizer: Any) -> None:
    """Change a request's messages in place before they are rendered. Generation thread."""


@hookspec(firstresult=True)
def fetch_ahead(
    request: Any, args: Any, tokenizer: Any, prompt: Prompt
) -> Callable[[], bool] | None:
    """Begin to fetch what a prompt needs; return what says when it is there. Generation thread."""


@hookspec(firstresult=True)
def prepare_prompt(request: Any, args: Any, tokenizer: Any, prompt: Prompt) -> Prompt | None:
    """Return the prompt to feed instead of the rendered one. Generation thread."""


@hookspec(firstresult=True)
def fetch_nearest_cache(model: Any, tokens: list[int]) -> tuple[list[Any] | None, list[int]] | None:
    """Return a prompt cache and the tokens it does not hold, at least one. Generation thread."""


@hookspec(firstresult=True)
def insert_cache(
    model: Any, tokens: list[int], prompt_cache: list[Any], cache_type: str
) -> bool | None:
    """Keep a prompt cache; True when it is kept. Generation thread."""


@hookspec
def response_headers(request: Any) -> list[tuple[str, str]]:  # type: ignore[empty-body]
    """Return headers to add to the reply. HTTP thread."""


@hookspec
def reply_sent(
    request: Any, content: str, reasoning: str, tool_calls: list[dict[str, Any]]
) -> None:
    """The whole reply, as the client sees it, just before its last part is sent. HTTP thread."""


@hookspec
def routes() -> list[Route]:  # type: ignore[empty-body]
    """Return HTTP routes to serve beside the stock ones."""


@hookspec
def shutdown() -> None:
    """The server stops: finish what is pending and close files. Main thread."""
