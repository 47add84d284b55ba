"""HTTP routes that plugins add to the server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Route:
    """One path that a plugin answers.

    `handle` gets the `BaseHTTPRequestHandler` of the request, on its HTTP thread.
    `path` is compared with the request's path without its query.
    """

    method: str
    path: str
    handle: Callable[[Any], None]
