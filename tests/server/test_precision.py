"""The default precision on the real server."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import StartServer

MESSAGES = [
    {"role": "system", "content": "The lock keeper answers in short sentences. " * 20},
    {"role": "user", "content": "How high is the water, and who opened the lower gate?"},
]


@pytest.mark.parametrize(
    ("again", "restored"),
    [
        ((), True),
        (("--kvpersist-kv-bits", "k6v4"), False),
    ],
)
def test_a_conversation_is_found_in_the_precision_it_was_stored_in(
    tiny_model: Path, start_server: StartServer, again: tuple[str, ...], restored: bool
) -> None:
    """A restart changes no reply."""
    server = start_server.with_plugin(tiny_model)
    first = server.chat(MESSAGES, session="s")
    assert re.search(r"keys 8 bits, values 4, rotated .* \d\d% of the unquantized size", server.log)
    messages = [*MESSAGES, {"role": "assistant", "content": first.text}]
    messages.append({"role": "user", "content": "And then?"})
    uninterrupted = server.chat(messages, session="s")
    server.terminate()
    server = start_server.with_plugin(tiny_model, *again)
    reply = server.chat(messages, session="s")
    assert (reply.cached_tokens > first.prompt_tokens) is restored
    if restored:
        assert reply.text == uninterrupted.text
    else:
        assert reply.kvpersist["reason"] == "other-precision"
