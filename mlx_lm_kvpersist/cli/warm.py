"""`mlx-lm-kvpersist sessions warm`: a running server computes a beginning, and it is pinned.

The server is sent a request for one token. What it stores of it is found by every later prompt that
begins so.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from pathlib import Path
from typing import Any

from ..api.admin import STATS_PATH
from ..errors import ConfigError, KVPersistError
from ..store.index import Session
from .asking import ask
from .opening import changing, reading
from .output import shown, tell
from .sessions import describe

_NOT_SENT = re.compile(r"[^!-~ ]+")
"""Characters that a header cannot have."""
_COMPUTED_S = 3600.0
_SAVED_S = 60.0
_POLL_S = 0.1


def run(args: argparse.Namespace) -> int:
    """Run the command; return the exit status. Raises KVPersistError where it is not stored."""
    path, body = request_of(args.file)
    folder = args.kvpersist_dir or Path(ask(args.url, STATS_PATH)["store"]["folder"])
    name = _NOT_SENT.sub("-", args.name or f"warm {args.file.stem}")
    since_s = time.time()
    ask(args.url, path, body, {"X-Session-ID": name}, timeout_s=_COMPUTED_S)
    newest = _saved(folder, name, since_s)
    with changing(folder) as disk, disk.lock.held():
        # Of what was warmed under this name before, only the newest stays.
        for session in disk.index.sessions():
            if session.name == name and session.root == newest.root:
                if session.pinned != (session.id == newest.id):
                    disk.set_pinned(session, session.id == newest.id)
        about = describe(disk.index, newest)
    said = f"{newest.id}  {shown(name)}  is computed and pinned: {newest.n_tokens:,} tokens"
    tell(args, {**about, "pinned": True}, said)
    return 0


def request_of(file: Path) -> tuple[str, dict[str, Any]]:
    """Return the path and the body of a request that computes a file's prompt, and little more.

    The file holds messages, or a body of Chat Completions, Messages, Responses or Completions.
    Raises ConfigError for anything else.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as JSON: {error}") from error
    body = {"messages": content} if isinstance(content, list) else content
    if not isinstance(body, dict) or not {"messages", "input", "prompt"} & body.keys():
        raise ConfigError(f"{file} holds no messages and no request, expected either as JSON")
    tools = body.get("tools")
    is_anthropic = "system" in body or (
        isinstance(tools, list) and any(isinstance(t, dict) and "input_schema" in t for t in tools)
    )
    path, limit = "/v1/chat/completions", "max_tokens"
    if "input" in body:
        path, limit = "/v1/responses", "max_output_tokens"
    elif "prompt" in body:
        path = "/v1/completions"
    elif is_anthropic:
        path = "/v1/messages"
    left_out = {"stream", "stream_options", "max_completion_tokens"}
    body = {key: value for key, value in body.items() if key not in left_out}
    return path, {**body, "model": "default_model", limit: 1}


def _saved(folder: Path, name: str, since_s: float) -> Session:
    """Return the session of this name that was saved since. Raises KVPersistError if none is."""
    deadline_s = time.monotonic() + _SAVED_S
    with reading(folder) as index:
        while time.monotonic() < deadline_s:
            found = [one for one in index.sessions() if one.name == name and one.used >= since_s]
            if found:
                return max(found, key=lambda session: session.used)
            time.sleep(_POLL_S)
    raise KVPersistError(
        f"the server answered, but stored nothing in {folder} within {_SAVED_S:.0f} s; its log "
        "says why"
    )
