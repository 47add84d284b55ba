"""A plugin of `mlx_lm.server` that writes one line of CSV for each request.

mlx_lm.server --plugin kvpersist --plugin csvlog --csvlog requests.csv --model MODEL
"""

from __future__ import annotations

import csv
import json
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from email.message import Message
from pathlib import Path
from threading import Lock
from typing import Any, TextIO

from mlx_lm_kvpersist.plugins import ClientRequest, ConfigError, Prompt, Route, hookimpl

COLUMNS = ("ended", "session", "prompt_tokens", "reply_tokens", "first_token_s", "outcome")


@dataclass
class Notes:
    """The plugin's notes about one request until the request ends."""

    session: str = ""
    prompt_tokens: int | None = None

    @staticmethod
    def of(request: ClientRequest) -> Notes:
        """Return the notes of a request. All hooks get the same object for one request."""
        notes: Notes = vars(request).setdefault("csvlog", Notes())
        return notes


class CSVLog:
    """The hooks are in the order in which the server calls them."""

    def __init__(self) -> None:
        self._file: TextIO | None = None
        self._lock = Lock()  # replies end on several HTTP threads
        self._n_requests = 0

    @hookimpl
    def add_options(self, parser: ArgumentParser) -> None:
        group = parser.add_argument_group("csvlog", "One line of CSV for each request.")
        group.add_argument("--csvlog", type=Path, metavar="FILE", help="the file to append to")

    @hookimpl
    def configure(self, args: Namespace) -> None:
        if args.csvlog is None:
            raise ConfigError("--plugin csvlog needs a file: add --csvlog FILE")
        try:
            self._file = args.csvlog.open("a", encoding="utf-8", newline="")
        except OSError as error:
            raise ConfigError(f"--csvlog: {error}; choose another file") from error
        if args.csvlog.stat().st_size == 0:
            self._write(COLUMNS)

    @hookimpl
    def routes(self) -> list[Route]:
        return [Route("GET", "/csvlog", self._answer)]

    @hookimpl
    def request_received(self, request: ClientRequest, headers: Message) -> None:
        Notes.of(request).session = headers.get("X-Session-ID", "")

    @hookimpl
    def prompt_rendered(self, request: ClientRequest, prompt: Prompt) -> None:
        Notes.of(request).prompt_tokens = len(prompt.ids)

    @hookimpl
    def reply_timed(self, request: ClientRequest, times_s: Sequence[float]) -> None:
        notes = Notes.of(request)
        if request.client_gone:
            outcome = "client left"
        else:
            outcome = "replied" if times_s else "failed"
        first_token_s = f"{times_s[0]:.3f}" if times_s else ""
        ended = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        self._write(
            (ended, notes.session, notes.prompt_tokens, len(times_s), first_token_s, outcome)
        )
        with self._lock:
            self._n_requests += 1

    @hookimpl
    def shutdown(self) -> None:
        if self._file is not None:
            self._file.close()

    def _write(self, row: Sequence[Any]) -> None:
        assert self._file is not None
        with self._lock:
            csv.writer(self._file).writerow(row)
            self._file.flush()

    def _answer(self, handler: Any) -> None:
        """Answer `GET /csvlog` with the number of requests. HTTP thread."""
        body = json.dumps({"requests": self._n_requests}).encode()
        handler.send_response(200)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        handler.wfile.write(body)
