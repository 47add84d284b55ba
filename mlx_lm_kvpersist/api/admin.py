"""The operator's routes and page, for programs on the server's machine or with the server's key."""

from __future__ import annotations

import hmac
import ipaddress
import json
import re
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping
from email.message import Message
from hashlib import sha256
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit

from ..apis import openai_error, require, require_text
from ..errors import RequestRefused

REQUESTS_PATH = "/v1/kvpersist/requests"
STATS_PATH = "/v1/kvpersist/stats"
SPEC_PATH = "/v1/kvpersist/spec"
METRICS_PATH = "/metrics"
PAGE_PATH = "/kvpersist"
SESSIONS_PATH = "/v1/kvpersist/sessions"
MAX_TITLE_CHARS = 200
KEY_VARIABLE = "KVPERSIST_API_KEY"
JSON_HEADERS = {"Content-Type": "application/json"}
_PROXY_HEADERS = {
    *("forwarded", "via", "x-real-ip", "x-client-ip", "true-client-ip", "cf-connecting-ip"),
    "tailscale-user-login",
}
"""Headers that proxies add, besides all headers that begin with X-Forwarded-."""
_PAGE = Path(__file__).with_name("page.html")
_ROOT_TEXT = b"The API of this server is at /v1, such as POST /v1/chat/completions.\n"
_INLINE = re.compile(rb"<(script|style)>(.*?)</\1>", re.DOTALL)


class Parts(NamedTuple):
    """Content that is sent in parts, because it may not fit into memory."""

    n_bytes: int
    chunks: Iterable[bytes]


class Answer(NamedTuple):
    """A route's answer. `content` is bytes, Parts, or an object to send as JSON."""

    content: Any
    status: int = 200
    headers: Mapping[str, str] = MappingProxyType({})


def answering(answer: Callable[[Any], Any]) -> Callable[[Any], None]:
    """Return a route's function, which sends the result or the RequestRefused of `answer`.

    answer: takes the HTTP handler; returns an Answer, its `content`, or None if it has replied.
    """

    def handle(handler: Any) -> None:
        try:
            answered = answer(handler)
        except RequestRefused as error:
            answered = Answer(openai_error(error.status, str(error), error.code), error.status)
        if answered is not None:
            send(handler, answered if isinstance(answered, Answer) else Answer(answered))

    return handle


def send(handler: Any, answer: Answer) -> None:
    content, status, headers = answer
    if not isinstance(content, bytes | Parts):
        content, headers = json.dumps(content).encode(), {**JSON_HEADERS, **headers}
    n_bytes, chunks = content if isinstance(content, Parts) else (len(content), [content])
    handler.send_response(status)
    for name, value in headers.items():
        handler.send_header(name, value)
    if status != 204:
        handler.send_header("Content-Length", str(n_bytes))
    handler.end_headers()
    for chunk in chunks:
        handler.wfile.write(chunk)


def operator_route(answer: Callable[[Any], Any], key: str | None) -> Callable[[Any], None]:
    """Like `answering`, but only for the operator's requests.

    With a `key`, a request must have the key. Without a key, the request must come from this
    machine, and a POST request must not come from another server's page.
    """

    def checked(handler: Any) -> Any:
        check_operator(handler, key)
        if handler.command == "POST":
            check_site(handler.headers, key)
        return answer(handler)

    return answering(checked)


def operator_change(
    change: Callable[[dict[str, Any]], Any], key: str | None
) -> Callable[[Any], None]:
    """Return an `operator_route` that changes something; `change` takes the request's JSON body."""

    def answer(handler: Any) -> Any:
        kind = handler.headers.get_content_type() if "Content-Type" in handler.headers else None
        if kind != "application/json":
            raise RequestRefused(f"Content-Type is {kind}, expected application/json", 415)
        return change(handler.read_json())

    return operator_route(answer, key)


def check_operator(handler: Any, key: str | None) -> None:
    """Refuse a request that is not the operator's; see `operator_route`.

    A request from this machine's address may come through a proxy, or from a hostile page whose
    host name resolves to this machine. Headers show both.
    """
    address, headers = handler.client_address[0], handler.headers
    if key is not None:
        if not _has_key(headers, key):
            why = f"expected the header Authorization: Bearer KEY, with the server's {KEY_VARIABLE}"
            more = "commands read the key from a variable of this name"
            raise RequestRefused(f"{why}; {more}", 403)
        return
    origin = headers.get("Origin")
    names = ((name, name.lower()) for name in headers)
    forwarded = [n for n, low in names if low in _PROXY_HEADERS or low.startswith("x-forwarded-")]
    if not is_loopback(address):
        reason = f"the request comes from {address}"
    elif forwarded:
        reason = f"the request came through a proxy ({forwarded[0]})"
    elif not is_loopback(headers.get("Host", "")):
        reason = "the header Host names another machine"
    elif origin is not None and not is_loopback(origin.partition("://")[2]):
        reason = "the header Origin names another site"
    else:
        return
    raise RequestRefused(
        f"only for programs of the server's own machine, and {reason}; or set {KEY_VARIABLE}", 403
    )


def _has_key(headers: Message, key: str | None) -> bool:
    # http.server decodes headers as Latin-1: undo that.
    sent = headers.get("Authorization", "").encode("latin-1", "replace")
    return key is not None and hmac.compare_digest(sent, f"Bearer {key}".encode())


def check_site(headers: Message, key: str | None) -> None:
    """Refuse a browser's request from a page of another server, unless it has this server's key."""
    if _has_key(headers, key):
        return
    origin, site = headers.get("Origin"), headers.get("Sec-Fetch-Site", "same-origin")
    if origin is not None and origin.partition("://")[2] != headers.get("Host", ""):
        reason = f"the Origin is {origin!r}"
    elif site not in ("same-origin", "none"):
        reason = f"Sec-Fetch-Site is {site!r}"
    else:
        return
    raise RequestRefused(f"only this server's own page may change something, and {reason}", 403)


def is_loopback(host: str) -> bool:
    """Tell whether a host, with or without a port, is `localhost` or a loopback address."""
    is_bare_ipv6 = host.count(":") > 1 and not host.startswith("[")
    try:
        name = host.partition("%")[0] if is_bare_ipv6 else urlsplit(f"//{host}").hostname or ""
        if name in ("localhost", "localhost."):
            return True
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


def page_view(key: str | None) -> Callable[[Any], None]:
    """With a key, everybody gets the page: it asks for the key."""
    page = _PAGE.read_bytes()
    hashes = {tag.decode(): sha256(content).digest() for tag, content in _INLINE.findall(page)}
    inline = [f"{tag}-src 'sha256-{b64encode(digest).decode()}'" for tag, digest in hashes.items()]
    policy = [
        *("default-src 'none'", *inline, "connect-src 'self'", "img-src data:"),
        *("base-uri 'none'", "form-action 'none'", "frame-ancestors 'none'"),
        *("require-trusted-types-for 'script'", "trusted-types 'none'"),
    ]
    headers = {
        "Content-Type": "text/html; charset=utf-8",
        "Content-Security-Policy": "; ".join(policy),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
    }
    answer = Answer(page, headers=headers)
    if key is not None:
        return answering(lambda handler: answer)
    return operator_route(lambda handler: answer, key)


def root_view(key: str | None) -> Callable[[Any], None]:
    """Return the function of `/`. Operators get the page. Other clients get the API's path."""

    def answer(handler: Any) -> Answer:
        try:
            if key is None:  # otherwise the page itself asks for the key
                check_operator(handler, key)
        except RequestRefused:
            return Answer(_ROOT_TEXT, headers={"Content-Type": "text/plain; charset=utf-8"})
        return Answer(b"", 303, {"Location": PAGE_PATH})

    return answering(answer)


def sessions_view(describe: Callable[..., Any]) -> Callable[[Any], Any]:
    """Return a function that lists the sessions, the largest first if `sort` is "size"."""

    def answer(handler: Any) -> Any:
        query = dict(parse_qsl(handler.path.partition("?")[2], keep_blank_values=True))
        skip = query.get("skip", "0")
        require(bool(re.fullmatch("[0-9]{1,9}", skip)), "skip", skip, "a number of sessions")
        sort = query.get("sort", "used")
        require(sort in ("used", "size"), "sort", sort, "used or size")
        return describe(find=query.get("find", ""), skip=int(skip), by_size=sort == "size")

    return answer


def session_changes(
    sessions: Callable[[], Any],
    forget: Callable[[str | None, str | None], None],
    *,
    with_text: bool,
) -> dict[str, Callable[[dict[str, Any]], Any]]:
    """Return functions by path; each takes a body that names sessions.

    sessions: returns the store's `StoredSessions`. forget: see `AgentsAPI`. with_text: also search
    the first words of conversations.
    """

    def select(body: dict[str, Any]) -> Any:
        ids, find = body.get("ids"), body.get("find")
        if ids is None:
            return sessions().select(find=require_text("find", find), with_text=with_text)
        is_list = isinstance(ids, list) and all(isinstance(one, str) for one in ids)
        require(is_list and find is None, "ids", ids, "a list of ids, without find")
        return sessions().select(ids)

    def pin(body: dict[str, Any]) -> Any:
        pinned = body.get("pinned")
        require(isinstance(pinned, bool), "pinned", pinned, "true or false")
        return sessions().pin(require_text("id", body.get("id")), bool(pinned))

    def evict(body: dict[str, Any]) -> Any:
        return sessions().evict(require_text("id", body.get("id")))

    def delete(body: dict[str, Any]) -> Any:
        session, namespace, done = sessions().delete(require_text("id", body.get("id")))
        forget(session.name, namespace)
        return done

    def rename(body: dict[str, Any]) -> Any:
        title = require_text("title", body.get("title")).strip()
        limit = f"at most {MAX_TITLE_CHARS} characters"
        require(len(title) <= MAX_TITLE_CHARS, "title", title, limit)
        return sessions().rename(require_text("id", body.get("id")), title)

    def export(body: dict[str, Any]) -> Any:
        file = Parts(*sessions().export(require_text("id", body.get("id"))))
        return Answer(file, headers={"Content-Type": "application/octet-stream"})

    changes = select, pin, evict, delete, rename, export
    return {f"{SESSIONS_PATH}/{change.__name__}": change for change in changes}
