"""The precision that is measured when a model is loaded, behind the real server."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support import StartServer

MESSAGES = [
    {"role": "system", "content": "The lock keeper answers in short sentences. " * 20},
    {"role": "user", "content": "How high is the water, and who opened the lower gate?"},
]


def chosen(start: StartServer) -> dict[str, str]:
    kept = json.loads((start.store / "precision.json").read_text())["measured"]
    (one,) = kept.values()
    slots: dict[str, str] = one["slots"]
    return slots


AUTO = (
    *("--kvpersist-kv-bits", "auto", "--kvpersist-kv-rotate", "auto"),
    *("--kvpersist-kv-measure-s", "10"),
)


@pytest.mark.parametrize(
    ("again", "restored"), [(AUTO, True), (("--kvpersist-kv-bits", "4"), False)]
)
def test_what_was_measured_stays(
    tiny_model: Path, start_server: StartServer, again: tuple[str, ...], restored: bool
) -> None:
    """A conversation is restored in the bits that were measured, and by fixed bits only if kept."""
    server = start_server.with_plugin(tiny_model, *AUTO)
    first = server.chat(MESSAGES, session="s")
    assert "measuring once which precision this model bears" in server.log
    assert re.search(r"keys .* bits, values .* on average.*, 0\.\d\d of full memory", server.log)
    before = chosen(start_server)
    server.terminate()
    server = start_server.with_plugin(tiny_model, *again)
    messages = [*MESSAGES, {"role": "assistant", "content": first.text}]
    messages.append({"role": "user", "content": "And then?"})
    reply = server.chat(messages, session="s")
    assert ("measuring once" in server.log) is False
    assert chosen(start_server) == before
    assert (reply.cached_tokens > first.prompt_tokens) is restored
    if not restored:
        assert reply.kvpersist["reason"] == "other-precision"
