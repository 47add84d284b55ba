"""The default precision, behind the real server."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import StartServer, make_tiny_model

MESSAGES = [
    {"role": "system", "content": "The lock keeper answers in short sentences. " * 20},
    {"role": "user", "content": "How high is the water, and who opened the lower gate?"},
]
DEFAULT = ("--kvpersist-kv-bits", "default", "--kvpersist-kv-rotate", "on")
OLD_NAMES = ("--kvpersist-kv-bits", "auto", "--kvpersist-kv-rotate", "auto")


@pytest.mark.parametrize(
    ("again", "restored"), [(OLD_NAMES, True), (("--kvpersist-kv-bits", "k6v4"), False)]
)
def test_a_conversation_is_found_in_the_precision_it_was_stored_in(
    tmp_path: Path, start_server: StartServer, again: tuple[str, ...], restored: bool
) -> None:
    """Two groups of layers are stored and restored; a restart changes no reply."""
    model = make_tiny_model(tmp_path / "model", n_layers=4)
    server = start_server.with_plugin(model, *DEFAULT)
    first = server.chat(MESSAGES, session="s")
    assert re.search(r"keys 6 to 8 bits, values 4, rotated .* 0\.\d\d of full memory", server.log)
    messages = [*MESSAGES, {"role": "assistant", "content": first.text}]
    messages.append({"role": "user", "content": "And then?"})
    uninterrupted = server.chat(messages, session="s")
    server.terminate()
    server = start_server.with_plugin(model, *again)
    reply = server.chat(messages, session="s")
    assert (reply.cached_tokens > first.prompt_tokens) is restored
    if restored:
        assert reply.text == uninterrupted.text
        assert server.log.count("auto is now an old name of default") == 1
    else:
        assert reply.kvpersist["reason"] == "other-precision"
