"""The hooks of the server, in the order in which a request meets them. All are optional.

Plugins are asked in the order of the command line. The first answer to a hook marked
`firstresult` counts; without an answer the server does as stock does. While requests are served, a
plugin that raises, or gives an answer that the server cannot use, is logged and passed over.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from email.message import Message
from typing import Any

import pluggy

from .answers import ClientRequest, ModelSupport, Prompt, Route, TakenRequest

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
def routes() -> list[Route]:  # type: ignore[empty-body]
    """Return HTTP routes to serve, in addition to the stock routes."""


@hookspec
def started(serve: Callable[[Callable[[Any], None]], None]) -> None:
    """The server is about to listen. Main thread.

    `serve` runs a function with a handler, as a route is run, for a request of the plugin's own:
    no client waits for its answer. Any thread may call it.
    """


@hookspec
def wired_limit(provider: Any, asked_bytes: int) -> int | None:
    """A model was loaded: say how many bytes macOS may keep wired. Generation thread.

    Stock asks for `asked_bytes`, all that the device recommends. The first answer counts. Not asked
    on devices without wired memory.
    """


@hookspec
def model_loaded(provider: Any) -> ModelSupport | None:
    """A model was loaded: say how its sequences are computed. Generation thread.

    All plugins are told; the first answer counts.
    """


@hookspec
def request_received(request: ClientRequest, headers: Message, body: Mapping[str, Any]) -> None:
    """A request is about to be queued; raise RequestRefused to refuse it. HTTP thread."""


@hookspec
def serving_changed(serving: bool) -> None:
    """Requests begin to be served where there were none, or none is any more. Generation thread."""


@hookspec
def idle() -> None:
    """Nothing is served: do very little work; a request would wait for it. Generation thread.

    Called some ten times a second.
    """


@hookspec
def prepare_messages(messages: list[dict[str, Any]], tools: list[Any] | None) -> None:
    """Change a request's messages and tools in place, before they are rendered. Any thread."""


@hookspec
def prompt_rendered(request: ClientRequest, prompt: Prompt) -> None:
    """A prompt for the loaded model is about to be queued, and waits for this. HTTP thread."""


@hookspec(firstresult=True)
def take_request(request: ClientRequest, prompt: Prompt) -> TakenRequest | None:
    """Take a rendered prompt. Generation thread; HTTP thread to count tokens."""


@hookspec
def early_headers(request: ClientRequest) -> list[tuple[str, str]]:  # type: ignore[empty-body]
    """Return headers for a stream that begins while its request still waits. Any thread."""


@hookspec
def response_headers(request: ClientRequest) -> list[tuple[str, str]]:  # type: ignore[empty-body]
    """Return headers to add to the reply; a stream that has begun gets comments. HTTP thread."""


@hookspec
def reply_sent(
    request: ClientRequest, content: str, reasoning: str, tool_calls: Sequence[dict[str, Any]]
) -> None:
    """The whole reply, as the client sees it, just before its last part is sent. HTTP thread."""


@hookspec
def reply_timed(request: ClientRequest, times_s: Sequence[float]) -> None:
    """A request has ended: when each token came, in seconds since it was queued. HTTP thread.

    The reply can have been cut off, or not have begun.
    """


@hookspec
def shutdown() -> None:
    """The server stops: finish what is pending and close files. Main thread."""
