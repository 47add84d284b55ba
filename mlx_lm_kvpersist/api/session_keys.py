"""A request's session key and namespace, and whether the request may be stored.

A session key is only a hint: the text decides which tokens are reused. Names of people (`user`,
`safety_identifier`, a whole `metadata.user_id`) are never keys.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from email.message import Message
from hashlib import blake2b
from itertools import permutations
from typing import Any

from ..errors import RequestRefused
from ..units import shortened

NAMESPACE_HEADER = "X-KVPersist-Namespace"
KEEP_HEADER = "X-KVPersist-Keep"
BILLING_PREFIX = "x-anthropic-billing-header:"

_VENDOR_SESSION = re.compile(r"(?!.*parent)x-[a-z0-9-]+-session-id", re.IGNORECASE)
_USER_ID_SESSION = re.compile(r"_session_([0-9a-fA-F-]{36})$")
_CODEX_HEADERS = ("thread-id", "session-id", "session_id", "conversation_id")

_TAGGED = re.compile(r"\s*<([\w-]+)>.*?</\1>", re.DOTALL)
_MAX_NAME_BYTES = 256
_WORDS_CHARS = 120

Messages = list[dict[str, Any]]
Find = Callable[[Message, Mapping[str, Any]], str | None]


def _header(name: str) -> Find:
    return lambda headers, body: headers.get(name)


def _claude_code(headers: Message, body: Mapping[str, Any]) -> str | None:
    session = headers.get("x-claude-code-session-id")
    return f"{session}/{headers.get('x-claude-code-agent-id') or 'main'}" if session else None


def _codex(headers: Message, body: Mapping[str, Any]) -> str | None:
    """Return Codex's session. Other clients may use the same header names differently."""
    agent = f"{headers.get('User-Agent', '')} {headers.get('originator', '')}".lower()
    if "codex" not in agent:
        return None
    return next(filter(None, map(headers.get, _CODEX_HEADERS)), None)


def _vendor(headers: Message, body: Mapping[str, Any]) -> str | None:
    names = [name for name in headers if _VENDOR_SESSION.fullmatch(name)]
    return headers.get(min(names)) if names else None


def _user_id_session(headers: Message, body: Mapping[str, Any]) -> str | None:
    """Claude Code puts a session's id into `metadata.user_id`, in JSON or after `_session_`."""
    user_id = _text(_metadata(body).get("user_id")) or ""
    try:
        decoded = json.loads(user_id)
    except (ValueError, RecursionError):
        suffix = _USER_ID_SESSION.search(user_id)
        return suffix[1] if suffix else None
    return _text(decoded.get("session_id")) if isinstance(decoded, dict) else None


SOURCES: dict[str, Find] = {
    "header X-Session-ID": _header("X-Session-ID"),
    "Claude Code's session and agent headers": _claude_code,
    "Codex's thread or session header": _codex,
    "header X-OpenWebUI-Chat-Id": _header("X-OpenWebUI-Chat-Id"),
    "header x-litellm-session-id": _header("x-litellm-session-id"),
    "header x-session-affinity": _header("x-session-affinity"),
    "header x-<vendor>-session-id": _vendor,
    "body prompt_cache_key": lambda headers, body: _text(body.get("prompt_cache_key")),
    "body session_id": lambda headers, body: _text(body.get("session_id")),
    "body metadata.session_id": lambda headers, body: _text(_metadata(body).get("session_id")),
    "body metadata.user_id": _user_id_session,
}
"""The places of a session key, in the order in which they are tried."""


def session_key(headers: Message, body: Mapping[str, Any]) -> str | None:
    """Return the client's name for its conversation, or None if the request has no name."""
    for find in SOURCES.values():
        if key := find(headers, body):
            return short_name(key)
    return None


def note(headers: Message, messages: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return labels by which people recognise a conversation.

    `client` is the first word of the User-Agent, such as "claude-cli". `words` is the beginning of
    the user's first message, without the tags that agents put before it.
    """
    client = re.match(r"[\w.-]{1,40}", headers.get("User-Agent", ""), re.ASCII)
    labels = {"client": client[0]} if client else {}
    for message in messages:
        content = message.get("content") if message.get("role") == "user" else None
        contents = content if isinstance(content, list) else [{"text": content}]
        text, start = "\n".join(_text(block.get("text")) or "" for block in contents), 0
        while tagged := _TAGGED.match(text, start):
            start = tagged.end()
        # The note keeps `_WORDS_CHARS` characters, so it has fewer words.
        if words := " ".join(text[start:].split(maxsplit=_WORDS_CHARS)):
            return {**labels, "words": shortened(words, _WORDS_CHARS)}
    return labels


def namespace(headers: Message, *, by_key: bool) -> str:
    """Return the namespace that a request names; with `by_key` a digest of API key and name.

    Nothing is shared between namespaces. Knowing the digest gives no access.
    """
    named = headers.get(NAMESPACE_HEADER) or ""
    if not by_key:
        return short_name(named)
    digest = blake2b(digest_size=16, person=b"kvpersist-by-key")
    for secret in (headers.get("x-api-key") or headers.get("Authorization") or "", named):
        encoded = secret.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return f"key-{digest.hexdigest()}"


def names_namespace(headers: Message, *, by_key: bool) -> bool:
    """Return whether a request names a namespace; with `by_key` an API key counts, too."""
    names = (NAMESPACE_HEADER, "x-api-key", "Authorization") if by_key else (NAMESPACE_HEADER,)
    return any(headers.get(name) for name in names)


def is_kept(headers: Message) -> bool:
    """Return whether a request may be stored. Raises RequestRefused if the header is wrong."""
    values = headers.get_all(KEEP_HEADER, ["yes"])
    for value in values:
        if value.strip().lower() not in ("yes", "no"):
            raise RequestRefused(f"{KEEP_HEADER} is {value!r}, expected yes or no")
    return all(value.strip().lower() == "yes" for value in values)


def unshared(namespace: str) -> str:
    """If sessions are isolated, a request without a session gets this random namespace."""
    return short_name(f"{namespace}/{secrets.token_hex(16)}")


def _metadata(body: Mapping[str, Any]) -> Mapping[str, Any]:
    metadata = body.get("metadata")
    return metadata if isinstance(metadata, dict) else {}


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def short_name(name: str) -> str:
    """Return a client's name unchanged, or its digest if it is long or not valid Unicode."""
    encoded = name.encode("utf-8", "surrogatepass")
    if len(encoded) <= _MAX_NAME_BYTES and encoded.decode("utf-8", "ignore") == name:
        return name
    return f"digest-{blake2b(encoded, digest_size=16, person=b'kvpersist-name-1').hexdigest()}"


def normalise(messages: Messages, tools: Any) -> None:
    """Normalise messages and tools, in place.

    Claude Code's billing line is removed from the beginning of a first system message. The same
    words elsewhere are the user's text. Content that is a single text part becomes a string:
    clients use either form. Reasoning gets both field names: mlx-lm sends one, most templates read
    the other.
    """
    match messages[:1]:
        case [{"role": "system", "content": str(text)}] if text.startswith(BILLING_PREFIX):
            messages[0]["content"] = text.partition("\n")[2]
        case [{"role": "system", "content": [{"text": str(text)}, *parts]}]:
            if text.startswith(BILLING_PREFIX):
                messages[0]["content"] = parts
    _drop_cache_control([*messages, *(tools if isinstance(tools, list) else ())])
    for message in messages:
        match message.get("content"):
            case [{"type": "text", "text": str(text)}]:
                message["content"] = text
        for name, second_name in permutations(("reasoning", "reasoning_content")):
            if isinstance(message.get(name), str) and message.get(second_name) is None:
                message[second_name] = message[name]


def _drop_cache_control(items: Iterable[Any]) -> None:
    """Drop `cache_control` from messages, their parts and tools: clients move it every turn.

    A field of this name in a tool's schema or arguments stays, because the client defines it.
    """
    for item in items:
        if isinstance(item, dict):
            item.pop("cache_control", None)
            if isinstance(item.get("content"), list):
                _drop_cache_control(item["content"])
            if isinstance(item.get("function"), dict):
                item["function"].pop("cache_control", None)
