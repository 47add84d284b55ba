"""The hooks of the server, their arguments and their answers.

Plugins import these names from `mlx_lm_kvpersist.plugins`. Only `prepare_messages` can change its
arguments. Each answer is checked; a PluginFault says what was expected.
"""

from __future__ import annotations

import copy
import math
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from email.message import Message
from functools import cached_property
from itertools import chain
from typing import Any, NoReturn

import pluggy

from ..errors import PluginFault
from ..units import shortened
from .scheduling.pace import Pace

PROJECT = "mlx_lm.server"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

PREFILL = "prefill"
"""The cache type of a prompt that is still being computed; see `TakenRequest.insert`."""

REPLY = "assistant"
"""mlx-lm's cache type at the end of a reply; the ends of earlier segments have other types."""

PARKED = "parked"
"""The cache type of a reply that was taken out of the batch, and continues later."""


def _refuse(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
    raise TypeError("a plugin cannot change this, expected changes of a copy (copy.deepcopy)")


class FrozenDict(dict[str, Any]):
    """A JSON object of a request. Only copies can be changed."""

    __setitem__ = __delitem__ = __ior__ = clear = pop = _refuse
    popitem = setdefault = update = _refuse

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return {name: copy.deepcopy(value, memo) for name, value in self.items()}


class FrozenList(list[Any]):
    """A JSON list of a request. Only copies can be changed."""

    __setitem__ = __delitem__ = __iadd__ = __imul__ = append = _refuse
    clear = extend = insert = pop = remove = reverse = sort = _refuse

    def __deepcopy__(self, memo: dict[int, Any]) -> list[Any]:
        return [copy.deepcopy(value, memo) for value in self]


class FrozenHeaders(Message):
    """The headers of a request."""

    def __init__(self, headers: Mapping[str, str] | Message) -> None:
        super().__init__()
        for name, value in headers.items():
            super().__setitem__(name, value)

    __setitem__ = __delitem__ = add_header = replace_header = _refuse


def frozen(value: Any) -> Any:
    """Return an unchangeable copy of a JSON value."""
    if isinstance(value, FrozenDict | FrozenList):
        return value
    if isinstance(value, dict):
        return FrozenDict({name: frozen(inner) for name, inner in value.items()})
    if isinstance(value, list):
        return FrozenList([frozen(inner) for inner in value])
    return value


class ClientRequest:
    """A request as plugins see it, from its arrival to its end.

    `kind` is "chat" or "text". `messages` are the client's messages; `prompt` is the text of a
    "text" request. Plugins may store data about a request in its attributes.
    """

    client_gone = False
    """Whether nobody waits for the reply any more."""
    continues = False
    """Whether the reply continues the last message, a message of the assistant."""
    places: Sequence[str] = ()
    """For an API other than mlx-lm's, the name of each message in the client's body."""

    def __init__(self, request: Any) -> None:
        self.kind: str = request.request_type
        self.prompt: str = request.prompt
        self.messages: Sequence[dict[str, Any]] = frozen(request.messages or [])

    def place(self, index: int) -> str:
        """Return the name of a message in the client's body, such as "messages[3]"."""
        return self.places[index] if index < len(self.places) else f"messages[{index}]"

    @staticmethod
    def of(request: Any) -> ClientRequest:
        """Return the plugins' object for a request of the server, always the same object."""
        client_request: ClientRequest | None = getattr(request, "seen_by_plugins", None)
        if client_request is None:
            client_request = request.seen_by_plugins = ClientRequest(request)
        return client_request


@dataclass(frozen=True)
class Prompt:
    """A tokenized prompt, and the segments into which `ResponseGenerator._tokenize` cuts it.

    `ids` are the joined segments; `segment_types` has "system" or "user" for each
    segment. The prompt was rendered from `messages`. All sequences become tuples.

    An image is a run of negative ids. The first is made from the image's SHA-256, and is at most
    -(2**256). All further ids are -1. Plugins must not change these ids. In `messages` an image is
    a part of the type "image" with its first id in hexadecimal, without the minus sign.
    """

    ids: Sequence[int]
    segments: Sequence[Sequence[int]]
    segment_types: Sequence[str]
    messages: Sequence[dict[str, Any]] = field(default=(), compare=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", tuple(self.ids))
        object.__setattr__(self, "segments", tuple(map(tuple, self.segments)))
        object.__setattr__(self, "segment_types", tuple(self.segment_types))


def has_text_only(messages: Iterable[Mapping[str, Any]]) -> bool:
    """Tell whether the messages contain only text: no image and no file."""
    contents = (message.get("content") for message in messages)
    blocks = (block for content in contents if isinstance(content, list) for block in content)
    return all(block.get("type") == "text" for block in blocks)


@dataclass(frozen=True)
class PrefillLimits:
    """The limits of the chunks in which prompts are computed.

    `max_stall_s` is how long a reply may wait for its next token while prompts are computed.
    `most_tokens(position)` is how many tokens a chunk may have after `position` tokens.
    If prompts may be computed together, each call of the model pads them to at least `least_width`
    tokens, but not beyond position `n_positions`. `max_unused_bytes` is how much freed memory MLX
    may keep for the next chunk. `pace` learns the speed from every chunk; plugins may read it, too.
    `stepped(n_replies, seconds)` is called after each step of the replies; `seconds` is None if
    prompts are being computed, or if the step had drafts. `took(n_tokens, position, n_bytes)` is
    called after each chunk that is computed while no reply runs. `n_bytes` is the peak of the
    memory in that chunk, without the model and the caches.
    """

    max_stall_s: float
    most_tokens: Callable[[int], int]
    max_unused_bytes: int = 1 << 30
    pace: Pace = field(default_factory=Pace)
    stepped: Callable[[int, float | None], None] = lambda n_replies, seconds: None
    took: Callable[[int, int, int], None] = lambda n_tokens, position, n_bytes: None
    least_width: int = 1
    n_positions: float = math.inf

    def __post_init__(self) -> None:
        expect(self.max_stall_s > 0, self.max_stall_s, "max_stall_s to be seconds above 0")
        most, unused = self.most_tokens(0), self.max_unused_bytes
        expect(isinstance(most, int) and most > 0, most, "most_tokens(0) to be at least 1")
        expect(isinstance(unused, int) and unused >= 0, unused, "max_unused_bytes to be 0 or more")


@dataclass(frozen=True)
class ModelSupport:
    """A plugin's answer to `model_loaded`. Its functions are called on the generation thread.

    `make_caches()` returns one cache per layer for a new sequence, or None for mlx-lm's caches.
    `merge(caches)` returns one batch cache for one layer's caches of several sequences; None lets
    the first cache merge them, as in mlx-lm. `together(caches, n_tokens)` gets one layer's caches
    of several prompts, each a batch of one row, and how many tokens of each prompt come next. It
    returns one cache to compute them together, padded on the right, or None to compute each alone.
    Caches with the same attribute `kind` share a mask, so prompts are computed together only if
    these caches have one class. `batches` says whether sequences may be served together at all. If
    `limits` is None, neither memory nor running replies limit the chunks. `draft` has the caches
    and limits of the draft model, if one was loaded. `most_taken_back(caches)` is for steps that
    check draft tokens: it returns the most tokens that one call may append to a batch's caches if
    `trim` must be able to remove any number of them. The default is 0.

    `weigh(replies, prompts, n_bytes)` records the running sequences, and returns whether memory
    suffices while the replies grow. It is called when sequences begin, end or grow by more than a
    few tokens. `replies` has the number of tokens of each reply so far, prompt included. `prompts`
    has the number of tokens of each prompt that is queued or being computed. `n_bytes` is the
    size of all these caches. If memory does not suffice, the youngest reply is taken out of the
    batch, and continues later (`TakenRequest.resume`). A sequence that is served alone is in
    `prompts`, and `n_bytes` is then None.
    """

    make_caches: Callable[[], Sequence[Any] | None]
    merge: Callable[[Sequence[Any]], Any] = lambda caches: None
    together: Callable[[Sequence[Any], Sequence[int]], Any] = lambda caches, n_tokens: None
    batches: bool = True
    limits: PrefillLimits | None = None
    weigh: Callable[[Sequence[int], Sequence[int], int | None], bool] = (
        lambda replies, prompts, n_bytes: True
    )
    draft: ModelSupport | None = None
    most_taken_back: Callable[[Sequence[Any]], int] = lambda caches: 0

    def __post_init__(self) -> None:
        is_right = isinstance(self.limits, PrefillLimits | None)
        expect(is_right, self.limits, "limits to be PrefillLimits or None")


@dataclass(frozen=True)
class Prepared:
    """The prompt of a request that enters, and caches of its first tokens.

    `caches`, one per layer, hold the first `n_cached` tokens, but never the last token; None means
    empty caches. `draft` has the draft model's caches, which may hold more or fewer tokens.
    """

    prompt: Prompt
    caches: Sequence[Any] | None = None
    n_cached: int = 0
    draft: Prepared | None = None

    def __post_init__(self) -> None:
        prompt, n_cached = self.prompt, self.n_cached
        expect(isinstance(prompt, Prompt), prompt, "a Prompt")
        has_types = len(prompt.segments) == len(prompt.segment_types) and all(prompt.segments)
        expect(bool(has_types and prompt.ids), prompt, "segments with a type and ids each")
        expect(REPLY not in prompt.segment_types, prompt, "no segment with the type of a reply")
        is_cut = tuple(chain.from_iterable(prompt.segments)) == prompt.ids
        expect(is_cut, prompt, "segments that are the prompt's ids cut up")
        expect(set(map(type, prompt.ids)) == {int}, prompt, "ids to be integers")
        found = f"{n_cached} cached of {len(prompt.ids)} tokens"
        expect(0 <= n_cached < len(prompt.ids), found, "at least one left to compute")
        has_caches = bool(self.caches)
        expect(has_caches == (n_cached > 0), found, "caches where tokens are cached, else None")


@dataclass(frozen=True)
class Route:
    """One path that a plugin answers.

    `handle` gets the `BaseHTTPRequestHandler` of the request, on its HTTP thread. `path` is
    compared with the request's path without its query. A part in braces, such as `{id}`, matches
    any part that is not empty; a path without braces is tried before a path with braces.
    """

    method: str
    path: str
    handle: Callable[[Any], None]

    def __post_init__(self) -> None:
        expect(self.method.isupper(), self, "a method in capital letters")
        expect(self.path.startswith("/"), self, "a path that begins with /")

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """A regular expression for the paths that `path` matches."""
        return re.compile(re.sub(r"\\{\w+\\}", "[^/]+", re.escape(self.path)))


@dataclass(eq=False)
class TakenRequest:
    """A plugin's answer to `take_request`: how it serves this request. A base class.

    A request enters when the server starts to compute its prompt. All methods run on the generation
    thread.
    """

    prompt: Prompt
    """The prompt that the model would read if the request entered now; also used to count
    tokens."""

    def advance(self) -> bool:
        """Tell whether the request can enter; the method may first work for some milliseconds.

        Called between steps while other requests are served, until it returns True. It may raise
        RequestRefused.
        """
        return True

    def enter(self) -> Prepared | None:
        """Return the prompt to read and the caches of its beginning; None lets mlx-lm serve it."""
        return Prepared(self.prompt)

    def insert(self, tokens: Sequence[int], caches: list[Any], cache_type: str) -> None:
        """Save the caches of `tokens`: the computed tokens of the prompt and of its reply.

        In `caches`, a draft model's caches come after the main model's. A cache may hold
        fewer tokens, because the model reads a reply's last token only to compute the next token.

        cache_type: "system" or "user" at the end of such a segment of a prompt; "prefill" after any
        other chunk of a prompt; "assistant" at the end of the reply, or when the client left;
        "parked" when the reply was taken out of the batch.
        """

    def draft_ids(self, run: Sequence[int], n: int) -> Sequence[int]:
        """Return up to `n` ids that may follow `run`, the last ids of the reply; none by default.

        Called for a single reply if the end of `run` is new in its conversation. A wrong draft only
        costs time.
        """
        return ()

    def resume(self, prompt: Prompt) -> None:
        """Let the request enter again: `advance` and `enter` are called for `prompt`, as before.

        Called after a reply was taken out of the batch: `prompt` then also has the reply's tokens.
        Also called if prompts failed together: `prompt` then has no token of a reply.
        """
        self.prompt = prompt


def check_caches(caches: Any, n_layers: int) -> None:
    expect(isinstance(caches, list | tuple), caches, "make_caches to return a list")
    expect(len(caches) == n_layers, f"{len(caches)} caches", f"one for each of {n_layers} layers")


def check_batch(merged: Any) -> None:
    is_batch = all(hasattr(merged, name) for name in ("extend", "extract", "filter"))
    expect(is_batch, merged, "merge to return a batch cache with extend, extract and filter")


def check_prepared(answer: Any) -> None:
    expect(isinstance(answer, Prepared), answer, "enter to return a Prepared or None")


def check_draft_ids(answer: Any) -> None:
    is_list = isinstance(answer, list | tuple)
    expect(is_list and all(type(id_) is int and id_ >= 0 for id_ in answer), answer, "token ids")


def check_headers(answer: Any) -> None:
    expect(isinstance(answer, list | tuple), answer, "a list of pairs of name and value")
    for header in answer:
        is_pair = isinstance(header, list | tuple) and len(header) == 2
        is_text = is_pair and all(isinstance(text, str) for text in header)
        # Other characters could add another header.
        is_right = is_text and re.fullmatch("[!-9;-~]+\n[ -~]*", "\n".join(header))
        expect(bool(is_right), header, "a name and a value in printable ASCII")


def check_answer(hook: str, answer: Any) -> None:
    """Raise PluginFault for an answer to a hook that the server cannot use."""
    if hook == "wired_limit":
        expect(isinstance(answer, int) and answer >= 0, answer, "a number of bytes, or None")
    elif hook == "model_loaded":
        expect(isinstance(answer, ModelSupport), answer, "a ModelSupport")
    elif hook == "take_request":
        expect(isinstance(answer, TakenRequest), answer, "a TakenRequest")
    elif hook == "routes":
        expect(isinstance(answer, list | tuple), answer, "a list of Route")
        expect(all(isinstance(route, Route) for route in answer), answer, "a list of Route")
    elif hook == "response_headers":
        check_headers(answer)


def expect(is_right: bool, answer: Any, expected: str) -> None:
    """Raise PluginFault unless an answer is right."""
    if not is_right:
        text = answer if isinstance(answer, str) else repr(answer)
        raise PluginFault(f"answered {shortened(text, 200)}, expected {expected}")


# The hooks, in the order in which a request meets them. All are optional. Plugins are asked in the
# order of the command line. A hook marked `firstresult` returns the first answer; without an answer
# the server behaves as stock does.


@hookspec
def add_options(parser: ArgumentParser) -> None:
    """Add command line options, in a separate argument group."""


@hookspec
def configure(args: Namespace) -> None:
    """Read the parsed options, and prove that the plugin works. Main thread.

    Raise ConfigError, or another KVPersistError, to stop the server with one line.
    """


@hookspec
def routes() -> list[Route]:  # type: ignore[empty-body]
    """Return HTTP routes to serve, in addition to mlx-lm's routes."""


@hookspec
def started(serve: Callable[[Callable[[Any], None]], None]) -> None:
    """The server is about to listen. Main thread.

    `serve(function)` calls `function` with a request handler, as if it were a route's `handle`. The
    handler has no client: an answer that `function` sends is not read. Any thread may call `serve`.
    """


@hookspec(firstresult=True)
def wired_limit(provider: Any, asked_bytes: int) -> int | None:
    """A model was loaded: say how many bytes macOS may keep wired. Generation thread.

    mlx-lm asks for `asked_bytes`, all that the device recommends. Not called on devices without
    wired memory.
    """


@hookspec
def model_loaded(provider: Any) -> ModelSupport | None:
    """A model was loaded: say how its sequences are computed. Generation thread.

    All plugins are called; the first answer counts.
    """


@hookspec
def request_received(request: ClientRequest, headers: Message, body: Mapping[str, Any]) -> None:
    """A request is about to be queued; raise RequestRefused to refuse it. HTTP thread."""


@hookspec
def idle() -> None:
    """No request runs. Do little work: a new request waits for this hook. Generation thread.

    Called when the last reply has ended, and then about ten times per second.
    """


@hookspec
def prepare_messages(messages: list[dict[str, Any]], tools: list[Any] | None) -> None:
    """Change a request's messages and tools in place, before they are rendered. Any thread."""


@hookspec
def prompt_rendered(request: ClientRequest, prompt: Prompt) -> None:
    """A prompt for the loaded model was rendered; it is queued after this hook. HTTP thread."""


@hookspec(firstresult=True)
def take_request(request: ClientRequest, prompt: Prompt) -> TakenRequest | None:
    """Take a request, or return None. Generation thread; HTTP thread if tokens are counted."""


@hookspec
def response_headers(  # type: ignore[empty-body]
    request: ClientRequest, is_early: bool
) -> list[tuple[str, str]]:
    """Return headers to add to the reply. HTTP thread.

    `is_early`: whether a stream begins while its request still waits. The hook is called again
    when the reply begins; the stream then gets the new headers as comments.
    """


@hookspec
def reply_sent(
    request: ClientRequest, content: str, reasoning: str, tool_calls: Sequence[dict[str, Any]]
) -> None:
    """The reply is complete; its last part is sent after this hook. HTTP thread.

    The arguments are the whole reply, as the client sees it.
    """


@hookspec
def reply_timed(request: ClientRequest, times_s: Sequence[float]) -> None:
    """A request has ended. HTTP thread.

    `times_s`: when each token came, in seconds since the request was queued. The reply may be cut
    off, or may not have begun.
    """


@hookspec
def shutdown() -> None:
    """The server stops: finish what is pending and close files. Main thread."""
