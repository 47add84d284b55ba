"""Fields of a request's body: what a wrong one is, in a sentence for the client."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from .errors import RequestRefused

_MAX_QUOTED = 40
_KINDS = {dict: "an object", list: "a list", str: "text", type(None): "null", bool: "a boolean"}


def require(is_right: bool, name: str, value: Any, expected: str) -> None:
    """Refuse a request unless one of its fields is right."""
    if not is_right:
        refuse(name, value, expected)


def refuse(name: str, value: Any, expected: str) -> NoReturn:
    """Raise RequestRefused: the name of a field, what was found there, what was expected."""
    shown = _KINDS.get(type(value))
    if isinstance(value, str) and len(value) <= _MAX_QUOTED:
        shown = json.dumps(value)
    elif shown is None:
        shown = "too large" if isinstance(value, int) and abs(value) > 10**20 else repr(value)
    raise RequestRefused(f"{name} is {shown}, expected {expected}")


def require_text(name: str, value: Any) -> str:
    """Return text; refuse a value that is none, or cannot be encoded (half a surrogate pair)."""
    require(isinstance(value, str), name, value, "text")
    try:
        value.isascii() or value.encode()
    except UnicodeEncodeError as error:
        raise RequestRefused(f"{name} is not valid Unicode at character {error.start}") from None
    text: str = value
    return text


def require_object(name: str, value: Any) -> dict[str, Any]:
    """Return an object; refuse a value that is none."""
    require(isinstance(value, dict), name, value, "an object")
    object_value: dict[str, Any] = value
    return object_value


def require_objects(name: str, value: Any) -> list[dict[str, Any]]:
    """Return a list of objects; refuse a value that is none."""
    require(isinstance(value, list), name, value, "a list of objects")
    return [require_object(f"{name}[{i}]", item) for i, item in enumerate(value)]
