"""What an operator may ask of a running server, from its own machine only."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Callable
from typing import Any

REQUESTS_PATH = "/v1/kvpersist/requests"
STATS_PATH = "/v1/kvpersist/stats"


def json_view(answer: Callable[[], Any]) -> Callable[[Any], None]:
    """Return a route's handler that sends what `answer` returns.

    It tells no one but processes of this machine: what it shows was said in private.
    """

    def handle(handler: Any) -> None:
        if not ipaddress.ip_address(handler.client_address[0].partition("%")[0]).is_loopback:
            send(handler, 403, {"error": "only to be asked from the server's own machine"})
            return
        send(handler, 200, answer())

    return handle


def send(handler: Any, status: int, content: Any) -> None:
    body = json.dumps(content).encode()
    handler.send_response(status)
    handler.send_header("Content-Type", "application/json")
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)
