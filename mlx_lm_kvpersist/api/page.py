"""The operator's page, and what its buttons do. It holds no data: its script asks for that."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from ..fields import require, require_text
from .admin import Parts, answering, check_operator

PAGE_PATH = "/kvpersist"
SESSIONS_PATH = "/v1/kvpersist/sessions"

_PAGE = Path(__file__).with_name("page.html")
_INLINE = re.compile(rb"<(script|style)>(.*?)</\1>", re.DOTALL)


def page_view(key: str | None) -> Callable[[Any], None]:
    """Return the handler of the page. With a key everybody gets it, and its script asks for it."""
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

    def answer(handler: Any) -> bytes:
        if key is None:
            check_operator(handler, key)
        return page

    return answering(answer, headers)


def sessions_view(describe: Callable[..., Any], key: str | None) -> Callable[[Any], None]:
    """Return the handler that lists sessions; `describe` takes the query's `find` and `skip`."""

    def answer(handler: Any) -> Any:
        check_operator(handler, key)
        query = dict(parse_qsl(handler.path.partition("?")[2]))
        skip = query.get("skip", "0")
        require(bool(re.fullmatch("[0-9]{1,9}", skip)), "skip", skip, "a number of sessions")
        return describe(find=query.get("find", ""), skip=int(skip))

    return answering(answer)


def session_changes(
    sessions: Callable[[], Any], forget: Callable[[str | None], None]
) -> dict[str, Callable[[dict[str, Any]], Any]]:
    """Return, by path, what takes a request's body and changes or exports a session.

    sessions: returns the store's `StoredSessions`. forget: as `AgentsAPI` takes it.
    """

    def pin(body: dict[str, Any]) -> Any:
        pinned = body.get("pinned")
        require(isinstance(pinned, bool), "pinned", pinned, "true or false")
        return sessions().pin(require_text("id", body.get("id")), bool(pinned))

    def evict(body: dict[str, Any]) -> Any:
        return sessions().evict(require_text("id", body.get("id")))

    def delete(body: dict[str, Any]) -> Any:
        session, done = sessions().delete(require_text("id", body.get("id")))
        forget(session.name)
        return done

    def rename(body: dict[str, Any]) -> Any:
        title = require_text("title", body.get("title")).strip()
        require(len(title) <= 200, "title", title, "at most 200 characters")
        return sessions().rename(require_text("id", body.get("id")), title)

    def export(body: dict[str, Any]) -> Any:
        return Parts(*sessions().export(require_text("id", body.get("id"))))

    changes = pin, evict, delete, rename, export
    return {f"{SESSIONS_PATH}/{change.__name__}": change for change in changes}
