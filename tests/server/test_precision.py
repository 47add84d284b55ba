"""The default precision on a real server."""

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
    ("new_options", "restored"),
    [
        ((), True),
        (("--kvpersist-kv-bits", "k6v4"), False),
    ],
)
def test_conversation_is_reused_only_in_its_stored_precision(
    tiny_model: Path, start_server: StartServer, new_options: tuple[str, ...], restored: bool
) -> None:
    """With the same precision, a restart changes no reply."""
    server = start_server.with_plugin(tiny_model)
    first = server.chat(MESSAGES, session="s")
    assert re.search(r"keys 8 bits, values 4, rotated .* \d\d% of the unquantized size", server.log)
    messages = [*MESSAGES, {"role": "assistant", "content": first.text}]
    messages.append({"role": "user", "content": "And then?"})
    uninterrupted = server.chat(messages, session="s")
    server.terminate()
    server = start_server.with_plugin(tiny_model, *new_options)
    reply = server.chat(messages, session="s")
    assert (reply.cached_tokens > first.prompt_tokens) is restored
    if restored:
        assert reply.text == uninterrupted.text
    else:
        assert reply.kvpersist["reason"] == "other-precision"
