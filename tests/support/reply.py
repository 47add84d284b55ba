"""The server's answer as one value, whether it is whole or a stream of events."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from http.client import HTTPResponse
from typing import Any

OUTCOME_HEADER = "x-kvpersist"


class ServerError(Exception):
    """The server did not start, died, or answered with an error; the message shows its log."""


class PortTaken(ServerError):
    """Another process listens on the port that the server was to use."""


@dataclass(frozen=True)
class Reply:
    text: str
    finish_reason: str | None
    usage: dict[str, Any]
    headers: dict[str, str]  # names in lower case
    ttft_s: float  # from sending to the first text, or to the whole reply without a stream
    total_s: float
    raw: dict[str, Any]  # the reply, or the last chunk of a stream that had choices
    reasoning: str = ""
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    chunks: list[dict[str, Any]] = field(default_factory=list)  # every chunk of a stream
    times_s: list[float] = field(default_factory=list)  # when each text of a stream came

    @property
    def prompt_tokens(self) -> int:
        return int(self.usage.get("prompt_tokens", 0))

    @property
    def completion_tokens(self) -> int:
        return int(self.usage.get("completion_tokens", 0))

    @property
    def cached_tokens(self) -> int:
        details = self.usage.get("prompt_tokens_details") or {}
        return int(details.get("cached_tokens", 0))

    @property
    def ids(self) -> list[int]:
        """The tokens of a whole reply that was asked for with logprobs."""
        return [token["id"] for token in self.raw["choices"][0]["logprobs"]["content"]]

    @property
    def kvpersist(self) -> dict[str, str]:
        """The parts of the X-KVPersist header by name; empty without the header."""
        return parse_outcome(self.headers.get(OUTCOME_HEADER, ""))


def parse_outcome(header: str) -> dict[str, str]:
    """Split `outcome=EXTEND; tier=disk; reused=1234` into a dict.

    >>> parse_outcome("outcome=EXTEND; reused=12")
    {'outcome': 'EXTEND', 'reused': '12'}
    """
    parts = (part.partition("=") for part in header.split(";") if part.strip())
    return {name.strip(): value.strip().strip('"') for name, _, value in parts}


def response_headers(response: HTTPResponse) -> dict[str, str]:
    return {name.lower(): value for name, value in response.getheaders()}


def read_events(response: HTTPResponse) -> Iterator[tuple[str, str]]:
    """Yield (event name, data) of server-sent events, without comments."""
    name, data = "message", []
    for raw_line in response:
        line = raw_line.decode().rstrip("\r\n")
        if line.startswith("event:"):
            name = line[6:].strip()
        elif line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))
        elif not line and data:
            yield name, "\n".join(data)
            name, data = "message", []


def _said(choice: dict[str, Any]) -> tuple[str, str, list[dict[str, Any]]]:
    said = choice.get("message") or choice.get("delta") or choice
    text = said.get("content", choice.get("text")) or ""
    return text, said.get("reasoning") or "", said.get("tool_calls") or []


def read_reply(response: HTTPResponse, start: float, stream: bool) -> Reply:
    """Read an answer to its end; `start` is time.perf_counter() at sending.

    Raises ServerError for a stream that ends early.
    """
    parts: list[dict[str, Any]] = []
    times_s: list[float] = []
    events: Iterable[tuple[str, str]]
    events = read_events(response) if stream else [("", response.read().decode()), ("", "[DONE]")]
    for _, content in events:
        now_s = time.perf_counter() - start
        if content == "[DONE]":
            break
        parts.append(json.loads(content))
        if stream and any(any(_said(choice)) for choice in parts[-1]["choices"][:1]):
            times_s.append(now_s)
    else:
        raise ServerError("the stream ended before [DONE]")
    total_s = time.perf_counter() - start
    spoken = [part for part in parts if part["choices"]]
    said = [_said(part["choices"][0]) for part in spoken]
    last = spoken[-1] if spoken else {}
    return Reply(
        text="".join(text for text, _, _ in said),
        finish_reason=last["choices"][0]["finish_reason"] if last else None,
        usage=next((part["usage"] for part in reversed(parts) if part.get("usage")), {}),
        headers=response_headers(response),
        ttft_s=times_s[0] if times_s else total_s,
        total_s=total_s,
        raw=last,
        reasoning="".join(reasoning for _, reasoning, _ in said),
        tool_calls=[call for _, _, calls in said for call in calls],
        chunks=parts if stream else [],
        times_s=times_s,
    )
