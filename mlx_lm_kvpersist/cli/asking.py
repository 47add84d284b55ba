"""Ask a running server, as its operator or as a client."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from http.client import HTTPException, HTTPResponse
from typing import Any
from urllib.error import HTTPError
from urllib.request import ProxyHandler, Request, build_opener

from ..api.admin import KEY_VARIABLE
from ..apis import message_of
from ..errors import KVPersistError


def answer(
    url: str,
    path: str,
    body: Any = None,
    headers: Mapping[str, str] | None = None,
    timeout_s: float = 10.0,
) -> HTTPResponse:
    """Open a server's answer; with a body it is posted. Raises KVPersistError without an answer.

    What is raised while the answer is read is the caller's.
    """
    url = url.rstrip("/") if "://" in url else f"http://{url.rstrip('/')}"
    key = os.environ.get(KEY_VARIABLE)
    sent = {"Authorization": f"Bearer {key}"} if key else {}
    sent |= {"Content-Type": "application/json", **(headers or {})}
    payload = None if body is None else json.dumps(body).encode()
    opener = build_opener(ProxyHandler({}))  # a server on this machine is not behind a proxy
    try:
        reply: HTTPResponse = opener.open(Request(f"{url}{path}", payload, sent), timeout=timeout_s)
        return reply
    except HTTPError as error:
        with error:
            if why := message_of(error.read()):
                raise KVPersistError(f"{url} refused: {why}") from error
            raise KVPersistError(
                f"{url} answered {error.code} to {path}; "
                "is it mlx_lm.server with --plugin kvpersist?"
            ) from error
    except (OSError, ValueError, HTTPException) as error:
        raise _no_answer(url, error) from error


def ask(url: str, path: str, body: Any = None, timeout_s: float = 10.0) -> Any:
    """Return a server's JSON; else as `answer`."""
    with answer(url, path, body, timeout_s=timeout_s) as reply:
        try:
            return json.load(reply)
        except (OSError, ValueError, HTTPException) as error:
            raise _no_answer(url, error) from error


def _no_answer(url: str, error: Exception) -> KVPersistError:
    return KVPersistError(
        f"no answer from {url} ({error}); name a running server with --url, "
        "or its store with --kvpersist-dir"
    )
