"""The default precision, behind the real server."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support import StartServer, make_tiny_model, synthetic_text, wait_until
from tests.support.synthetic.outliers import add_outliers

MESSAGES = [
    {"role": "system", "content": "The lock keeper answers in short sentences. " * 20},
    {"role": "user", "content": "How high is the water, and who opened the lower gate?"},
]
DEFAULT = ("--kvpersist-kv-bits", "default", "--kvpersist-kv-rotate", "on")
OLD_NAMES = ("--kvpersist-kv-bits", "auto", "--kvpersist-kv-rotate", "on")


@pytest.mark.parametrize(
    ("again", "restored"),
    [
        pytest.param(OLD_NAMES, True, marks=pytest.mark.slow),
        (("--kvpersist-kv-bits", "k6v4"), False),
    ],
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


def test_a_model_that_does_not_bear_the_default_gets_more_bits(
    tmp_path: Path, start_server: StartServer
) -> None:
    """From when nobody asked on; a later start begins so, and finds what was stored since.

    What is warm stays warm.
    """
    file = tmp_path / "beginning.json"
    file.write_text(json.dumps([{"role": "system", "content": synthetic_text(1500, seed=61)}]))
    plain = make_tiny_model(
        tmp_path / "plain", n_layers=4, config={"max_position_embeddings": 1000}
    )
    model = add_outliers(plain, tmp_path / "outliers", factors=(100.0, 200.0))
    server = start_server.with_plugin(model, *DEFAULT, "--kvpersist-warm", str(file))
    asked = {"role": "user", "content": "And then?"}
    before = server.chat(MESSAGES, session="before")
    wait_until(lambda: "from now on: the default loses" in server.log, "the guard to judge", 120)
    wait_until(lambda: server.log.count("is computed and pinned") == 2, "what is warm")
    warm = server.chat([*json.loads(file.read_text()), asked], max_tokens=2)
    assert warm.cached_tokens > 256
    said = json.loads(server.request("GET", "/v1/kvpersist/stats")[2])["precision"]
    assert said.startswith(("keys 8 bits", "full precision"))
    assert "the default loses" in said
    messages = [*MESSAGES, {"role": "assistant", "content": before.text}, asked]
    first = server.chat(messages, session="before")
    assert (first.cached_tokens, first.kvpersist["reason"]) == (0, "other-precision")
    messages += [{"role": "assistant", "content": first.text}, asked]
    uninterrupted = server.chat(messages, session="before")
    assert uninterrupted.cached_tokens > first.prompt_tokens
    server.restart(kill=True)
    assert server.log.count("from now on") == 1
    reply = server.chat(messages, session="before")
    assert reply.cached_tokens > first.prompt_tokens and reply.text == uninterrupted.text
