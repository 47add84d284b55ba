"""An interrupted reply is a stored turn: the next prompt reuses the text that the client read."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Generator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.support import (
    FULL_PRECISION,
    Message,
    ServerProcess,
    StartServer,
    heed_biases,
    make_zoo_model,
    synthetic_text,
)
from tests.support.reply import parse_outcome
from tests.support.scripted import ScriptedServer
from tests.support.waiting import wait_until

from .stored import n_computed, n_tokens, wait_for_writer

CHAT = "/v1/chat/completions"
ASK: Message = {"role": "user", "content": "What does the west tower see? " + synthetic_text(300)}
NEXT: Message = {"role": "user", "content": "[Request interrupted by user]\nGo on."}
N_READ = 250
"""Tokens that the client reads before it disconnects."""
N_NEXT = 40
"""An upper bound for the tokens of the next message and the template's text around it."""
APIS = {
    "chat": (CHAT, "messages", "max_tokens"),
    "messages": ("/v1/messages", "messages", "max_tokens"),
    "responses": ("/v1/responses", "input", "max_output_tokens"),
}


def store_of(server: ServerProcess) -> Path:
    return Path(server.extra[server.extra.index("--kvpersist-dir") + 1])


def texts(
    server: ServerProcess, path: str, body: dict[str, Any], session: str
) -> Generator[str, None, None]:
    """Yield the text of each event of a stream, of any of the three APIs."""
    for _, data in server.events(path, {**body, "stream": True}, {"X-Session-ID": session}):
        event = {} if data == "[DONE]" else json.loads(data)
        delta = event.get("delta") or (event.get("choices") or [{}])[0].get("delta") or ""
        text = delta if isinstance(delta, str) else delta.get("text") or delta.get("content")
        if text:
            yield text


def interrupt(server: ServerProcess, path: str, body: dict[str, Any], session: str) -> str:
    """Read the text of `N_READ` tokens and disconnect; return it after the turn is saved."""
    with closing(texts(server, path, body, session)) as stream:
        read = "".join(next(stream) for _ in range(N_READ))
    wait_for_turn(server, session)
    return read


def wait_for_turn(server: ServerProcess, session: str) -> None:
    """Wait until a turn and the ids of its reply are on disk."""
    wait_until(lambda: n_tokens(store_of(server), session) > 0, f"a turn of {session!r}")
    wait_for_writer(server)


@pytest.mark.parametrize("name", APIS)
def test_text_read_before_a_disconnect_is_reused(
    scripted_server: ScriptedServer, name: str
) -> None:
    server, session = scripted_server.process, f"interrupted {name}"
    path, key, n_most = APIS[name]
    scripted_server.say(synthetic_text(9000, seed=32))
    text = interrupt(server, path, {"model": "claude-local", n_most: 4000, key: [ASK]}, session)
    talk = [ASK, {"role": "assistant", "content": text}, NEXT]
    status, headers, _ = server.request(
        "POST", path, {"model": "claude-local", n_most: 4, key: talk}
    )
    assert status == 200
    alone = server.request("POST", path, {"model": "claude-local", n_most: 1, key: [ASK]})
    n_prompt = int(parse_outcome(alone[1]["x-kvpersist"])["reused"]) + 1
    assert int(parse_outcome(headers["x-kvpersist"])["reused"]) >= n_prompt + 0.95 * N_READ


def word_bias(model: Path) -> dict[str, float]:
    """Return a `logit_bias` with which replies are made of " word" tokens.

    Tokenizing such a text gives the same ids, so a server without a store reads the same prompt.
    """
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    others = (i for i in range(config["vocab_size"]) if not _is_word(tokenizer, i))
    return {str(i): -100.0 for i in others}


def _is_word(tokenizer: Tokenizer, token_id: int) -> bool:
    return bool(re.fullmatch(" [a-z]+", tokenizer.decode([token_id])))


def test_reply_after_an_interruption_equals_stocks(started: StartServer, tiny_model: Path) -> None:
    server = started.with_plugin(tiny_model, *FULL_PRECISION)
    bias: dict[str, Any] = {"logit_bias": word_bias(tiny_model), "temperature": 0.0}
    heed_biases(server)
    text = interrupt(server, CHAT, {"messages": [ASK], "max_tokens": 4000, **bias}, "biased")
    server.restart(kill=True)
    heed_biases(server)
    reply = server.chat([ASK, {"role": "assistant", "content": text}, NEXT], **bias)
    stock = started(tiny_model)
    heed_biases(stock)
    expected = stock.chat(as_produced(text), **bias)
    n_restored = int(reply.kvpersist["restored"])
    assert n_restored == reply.cached_tokens > expected.prompt_tokens - 0.05 * N_READ - N_NEXT
    assert expected.text == reply.text


def as_produced(text: str) -> list[Message]:
    """Return the next prompt with which a server without a store reads the same ids.

    The server's detokenizer has dropped the leading space that the model generated.
    """
    return [ASK, {"role": "assistant", "content": f" {text}"}, NEXT]


@pytest.mark.parametrize(
    ("family", "seed"),
    [("llama", 7), ("gemma3_text", None), ("qwen3_next", None), ("mamba2", None)],
)
def test_reply_after_an_interruption_is_the_same_without_reuse(
    family: str, seed: int | None, start_server: StartServer, tmp_path: Path
) -> None:
    """Includes requests with a seed, which run alone, and models with checkpoints."""
    model = make_zoo_model(tmp_path / "model", family)
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config["max_position_embeddings"] = 8192
    (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    server = start_server.with_plugin(model)
    sampling: dict[str, Any] = {"logit_bias": word_bias(model), "temperature": 0.0, "seed": seed}
    heed_biases(server)
    text = interrupt(server, CHAT, {"messages": [ASK], "max_tokens": 4000, **sampling}, "biased")
    heed_biases(server)
    reply = server.chat([ASK, {"role": "assistant", "content": text}, NEXT], **sampling)
    elsewhere = {"X-KVPersist-Namespace": "elsewhere"}
    computed = server.chat(as_produced(text), headers=elsewhere, **sampling)
    assert computed.cached_tokens == 0 and computed.text == reply.text
    n_prompt = computed.prompt_tokens - N_READ
    assert reply.cached_tokens > (0.95 * N_READ if family == "llama" else 0.8 * n_prompt)


def test_prompt_of_a_disconnected_non_streaming_client_is_reused(
    started: StartServer, tiny_model: Path
) -> None:
    server = started.with_plugin(tiny_model)
    body = json.dumps({"messages": [ASK], "max_tokens": 30_000}).encode()
    head = f"POST {CHAT} HTTP/1.1\r\nX-Session-ID: left\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port or 0), timeout=60) as client:
        client.sendall(head.encode() + body)
        wait_until(lambda: n_computed(server) == 1, "the reply")
    wait_for_turn(server, "left")
    again = server.chat([ASK], max_tokens=4)
    # The block that the prompt ends in is reused unless the reply has filled it.
    assert again.cached_tokens >= again.prompt_tokens // 256 * 256 > 0


SLOW = """
import sys, time

import mlx_lm.server as stock

make_sampler = stock._make_sampler


def slow(args, tokenizer):
    sample = make_sampler(args, tokenizer)

    def wait(logprobs):
        time.sleep(0.1)
        return sample(logprobs)

    return wait


stock._make_sampler = slow
from mlx_lm_kvpersist._startup import serve

serve(sys.argv[1:])
"""
"""A server that computes ten tokens a second."""


@pytest.mark.parametrize("seed", [None, 7], ids=["batched", "alone"])
def test_prompt_sent_right_after_a_disconnect_reuses_the_reply(
    start_server: StartServer, tiny_model: Path, tmp_path: Path, seed: int | None
) -> None:
    launcher = tmp_path / "slow.py"
    launcher.write_text(SLOW, encoding="utf-8")
    options = ("--kvpersist-draft", "off")
    server = start_server.with_plugin(tiny_model, *options, launcher=(str(launcher),))
    lost, n_read = [], 40
    for number in range(2):
        ask: Message = {"role": "user", "content": f"{number}. {synthetic_text(300, seed=number)}"}
        body = {"messages": [ask], "max_tokens": 4000, "temperature": 0.0, "seed": seed}
        with closing(texts(server, CHAT, body, f"talk {number}")) as stream:
            read = "".join(next(stream) for _ in range(n_read))
        talk = [ask, {"role": "assistant", "content": read}, NEXT]
        reply = server.chat(talk, f"talk {number}", max_tokens=1)
        lost.append(reply.prompt_tokens - reply.cached_tokens - N_NEXT)
    assert max(lost) < n_read // 2, lost
