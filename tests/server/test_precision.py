"""The precision that is measured when a model is loaded, behind the real server."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mlx_lm_kvpersist.cache.geometry.fingerprint import content_hash, model_fingerprint
from mlx_lm_kvpersist.cache.geometry.precision import Allocation, PrecisionRequest, parse_precision
from mlx_lm_kvpersist.cache.measuring.persisted_allocation import put_allocation
from mlx_lm_kvpersist.cli.opening import changing, reading
from tests.support import StartServer

MESSAGES = [
    {"role": "system", "content": "The lock keeper answers in short sentences. " * 20},
    {"role": "user", "content": "How high is the water, and who opened the lower gate?"},
]


def chosen(start: StartServer) -> dict[str, str]:
    with reading(start.store) as index:
        (one,) = index.state.under("precision/").values()
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


def test_one_side_of_a_layer_alone_in_full_precision(
    tiny_model: Path, start_server: StartServer
) -> None:
    """A restart changes no reply where one layer's keys, and another's values, are not quantized.

    `auto` gives such layers to few models, so the store has that choice before the server starts.
    """
    names = {0: "k16v4rb64", 1: "k6v16b64"}
    slots = {slot: parse_precision(name) for slot, name in names.items()}
    made = Allocation(slots, measured_on="2026-01-02")
    fingerprint = model_fingerprint(tiny_model, None, content_hash)
    with changing(start_server.store, create=True) as disk:
        put_allocation(disk.index.state, fingerprint, PrecisionRequest(), made)
    options = ("--kvpersist-kv-bits", "auto", "--kvpersist-kv-rotate", "auto")
    server = start_server.with_plugin(tiny_model, *options)
    first = server.chat(MESSAGES, session="s")
    messages = [*MESSAGES, {"role": "assistant", "content": first.text}]
    messages.append({"role": "user", "content": "And then?"})
    uninterrupted = server.chat(messages, session="s")
    said = "keys 6 bits or in full precision, values 4 or in full precision"
    assert said in server.log and "measuring once" not in server.log
    server.terminate()
    server = start_server.with_plugin(tiny_model, *options)
    restored = server.chat(messages, session="s")
    assert restored.cached_tokens > first.prompt_tokens
    assert restored.text == uninterrupted.text
    assert chosen(start_server) == {str(slot): name for slot, name in names.items()}
