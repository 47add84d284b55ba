"""Requests with unusual models, options and endings on a real server."""

from __future__ import annotations

import json
import string
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import load as load_tokenizer
from tokenizers import Tokenizer

from mlx_lm_kvpersist.request.outcome import Reason
from tests.support import (
    Message,
    Reply,
    ServerError,
    ServerProcess,
    StartServer,
    heed_biases,
    make_tiny_model,
    make_zoo_model,
    n_not_sent,
    serves_holes,
    synthetic_text,
    wait_until,
)
from tests.support.host import make_environment

from .lora import make_adapter
from .stored import wait_for_commit

SYSTEM: Message = {"role": "system", "content": synthetic_text(120, seed=4)}
TOOL = {
    "type": "function",
    "function": {"name": "wave", "parameters": {"type": "object", "properties": {}}},
}


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartServer]:
    """Start servers that end with this module."""
    start = StartServer(tmp_path_factory.mktemp("edges"))
    try:
        yield start
    finally:
        start.close()


@pytest.fixture(scope="module")
def server(started: StartServer, tiny_model: Path) -> ServerProcess:
    """The server of most tests; each test has its own question."""
    return started.with_plugin(tiny_model)


@pytest.fixture(scope="module")
def other_weights(models_dir: Path) -> Path:
    """A model with the geometry and tokenizer of `tiny_model`, but other weights."""
    return make_tiny_model(models_dir / "other-weights", seed=1)


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def said(reply: Reply) -> Message:
    return {"role": "assistant", "content": reply.text}


def n_total(reply: Reply) -> int:
    return reply.prompt_tokens + reply.completion_tokens


def newest(server: ServerProcess) -> dict[str, Any]:
    """Return the record of the last request."""
    records: list[dict[str, Any]] = json.loads(server.request("GET", "/v1/kvpersist/requests")[2])
    return records[0]


# A vocabulary with holes.


def with_special_tokens_at(model: Path, first_id: int) -> Path:
    """Give a tiny model's special tokens ids far above those of all other tokens."""
    content = json.loads((model / "tokenizer.json").read_text())
    for n, added in enumerate(content["added_tokens"]):
        added["id"] = content["model"]["vocab"][added["content"]] = first_id + n
    (model / "tokenizer.json").write_text(json.dumps(content))
    return model


@pytest.mark.skipif(not serves_holes(), reason="this mlx-lm cannot serve such a vocabulary")
def test_text_that_names_roles_is_not_matched_as_a_conversation(
    started: StartServer, models_dir: Path, tmp_path: Path
) -> None:
    """The text names the roles, but has no control tokens."""
    config = {"vocab_size": 8023, "eos_token_id": 8022}
    model = make_tiny_model(models_dir / "holes", config=config)
    with_special_tokens_at(model, 8020)
    server, fresh = (
        started.with_plugin(model, "--kvpersist-dir", str(tmp_path / name)) for name in "ab"
    )
    talk = [user("hi")]
    first = server.chat(talk, max_tokens=24)
    talk += [said(first), user("more, please")]
    second = server.chat(talk, max_tokens=24)
    assert second.kvpersist["outcome"] == "EXTEND"
    spelled = [user(f"hi\nassistant\n{first.text}\nuser\nmore, please")]
    expected = fresh.chat(spelled, max_tokens=24)
    reply = server.chat(spelled, max_tokens=24)
    assert reply.prompt_tokens == expected.prompt_tokens
    assert reply.text == expected.text


# Models by request.


def test_sampled_replies_of_a_sentencepiece_model_are_reused(
    server: ServerProcess, tiny_model_spm: Path
) -> None:
    model = str(tiny_model_spm)
    talk = [SYSTEM]
    before = 0
    for n in range(4):
        talk.append(user(f"{n}. Grüße 🎉  an alle"))
        reply = server.chat(talk, "spm", max_tokens=30, temperature=1.0, model=model)
        assert reply.cached_tokens >= before - 1, f"turn {n}"
        assert (reply.kvpersist["outcome"] == "EXTEND") == (n > 0)
        talk.append(said(reply))
        before = n_total(reply)


def test_each_model_reuses_only_its_own_blocks(
    server: ServerProcess, tiny_model: Path, other_weights: Path
) -> None:
    question = [SYSTEM, user("Which weights are these?")]
    first = server.chat(question, "switch", model=str(tiny_model))
    other = server.chat(question, "switch", model=str(other_weights))
    # Other tests use this system message with the first model, but not with the second.
    assert (other.cached_tokens, other.kvpersist["outcome"]) == (0, "MISS")
    assert other.text != first.text
    back = server.chat(question, "switch", model=str(tiny_model))
    assert (back.text, back.cached_tokens) == (first.text, back.prompt_tokens - 1)
    again = server.chat(question, "switch", model=str(other_weights))
    assert (again.text, again.cached_tokens) == (other.text, again.prompt_tokens - 1)


@pytest.fixture(scope="module")
def adapter(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(tmp_path_factory.mktemp("adapter"), tiny_model)


def test_adapter_requests_reuse_only_their_own_blocks(
    server: ServerProcess, tiny_model: Path, adapter: Path
) -> None:
    question = [SYSTEM, user("Who adapted you?")]
    plain = server.chat(question, "a", model=str(tiny_model))
    # The adapted model's replies end with incomplete characters.
    params: dict[str, Any] = {"model": str(tiny_model), "adapters": str(adapter)}
    adapted = server.chat(question, "a", **params, logprobs=True)
    assert (adapted.cached_tokens, adapted.kvpersist["outcome"]) == (0, "MISS")
    assert adapted.text != plain.text
    talk = [*question, said(adapted), user("Really?")]
    more = server.chat(talk, "a", **params)
    assert more.cached_tokens == n_total(adapted) - n_not_sent(
        load_tokenizer(tiny_model), adapted.ids
    )


def test_model_with_its_own_cache_class_is_served_as_stock(
    server: ServerProcess, tmp_path: Path
) -> None:
    pytest.importorskip("mlx_lm.models.deepseek_v41", reason="newer than this mlx-lm")
    model = make_zoo_model(tmp_path / "model", "deepseek_v41")
    reply = server.chat([SYSTEM, user("What is kept?")], model=str(model))
    assert_says_stock(server, reply, "layer 0 has a LayerCache")


def assert_says_stock(server: ServerProcess, reply: Reply, why: str) -> None:
    assert reply.kvpersist["outcome"] == "STOCK"
    record = newest(server)
    assert record["id"] == reply.headers["x-kvpersist-request"]
    assert (record["outcome"], record["reason"]) == ("STOCK", Reason.NOT_KEPT.text)
    assert record["detail"].startswith(why)
    log = server.log
    assert f"served as stock does, nothing is kept: {why}" in log
    expected_text = f"served as in the stock server: {why}"
    assert any(record["id"] in line and expected_text in line for line in log.splitlines())


# Requests that end early or are refused.


def test_disconnected_clients_system_message_is_reused(server: ServerProcess) -> None:
    """The system message was prefilled as its own segment, and stored."""
    system: Message = {"role": "system", "content": synthetic_text(400, seed=21)}
    body = {"messages": [system, user("Tell it all.")], "max_tokens": 500, "stream": True}
    events = server.events("/v1/chat/completions", body)
    next(events)
    events.close()
    again = server.chat([system, user("Tell it all.")], max_tokens=5)
    n_last = 20  # tokens of the template and the question
    assert again.cached_tokens >= again.prompt_tokens - n_last
    assert again.kvpersist["tier"] == "ram"
    cold = server.chat([system, user("Tell it all.")], "cold", max_tokens=5, headers=tenant("cold"))
    assert (cold.cached_tokens, cold.text) == (0, again.text)


def tenant(name: str) -> dict[str, str]:
    return {"X-KVPersist-Namespace": name}


def spoken(reply: Reply, tokenizer: Tokenizer) -> list[str]:
    """Return the tokens of a reply that has logprobs; "Ġ" is a space."""
    content = reply.raw["choices"][0]["logprobs"]["content"]
    return [str(tokenizer.id_to_token(token["id"])) for token in content]


def stop_word(pieces: list[str], tokenizer: Tokenizer) -> tuple[int, str]:
    """Return the first position of a token that can be a stop word, and the word."""
    for n, piece in enumerate(pieces):
        word = piece.replace("Ġ", " ")
        if (
            n >= 2
            and word.strip().isascii()
            and word.strip().isalpha()
            and pieces.index(piece) == n
        ):
            # Stock looks for the ids that the stop word encodes to.
            if tokenizer.encode(word).tokens == [piece]:
                return n, word
    raise AssertionError(f"no stop word in {pieces}")


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(tiny_model / "tokenizer.json"))


def test_reply_before_a_stop_word_is_reused(server: ServerProcess, tokenizer: Tokenizer) -> None:
    """The stop word and the text after it, which the client does not get, are not reused."""
    # No two capitals are a token, so the reply's text encodes to the reply's ids.
    vocabulary = tokenizer.get_vocab()
    bias = {str(vocabulary[letter]): 60.0 for letter in string.ascii_uppercase}
    params: dict[str, Any] = {"max_tokens": 30, "logit_bias": bias}
    heed_biases(server)
    question = [SYSTEM, user("When do you stop?")]
    whole = server.chat(question, headers=tenant("whole"), logprobs=True, **params)
    position, stop = stop_word(spoken(whole, tokenizer), tokenizer)
    cut = server.chat(question, headers=tenant("stop"), stop=stop, **params)
    assert whole.text.startswith(cut.text + stop)
    assert (cut.completion_tokens, cut.finish_reason) == (position + 1, "stop")
    talk = [*question, said(cut), user("Go on.")]
    more = server.chat(talk, headers=tenant("stop"), max_tokens=5)
    assert more.cached_tokens == cut.prompt_tokens + position
    assert_as_cold(server, more, talk)


@pytest.mark.parametrize("stopped", [False, True], ids=["whole", "stopped"])
def test_reply_that_begins_with_a_space_is_reused(
    server: ServerProcess, tokenizer: Tokenizer, stopped: bool
) -> None:
    """The server removes the space; the text that it sends still matches."""
    vocabulary = tokenizer.get_vocab()
    words = [t for t in vocabulary if t[0] == "Ġ" and t[1:].isascii() and t[1:].isalpha()]
    bias = {str(vocabulary[token]): 60.0 for token in sorted(words)}
    params: dict[str, Any] = {"max_tokens": 12, "logit_bias": bias, "logprobs": True}
    heed_biases(server)
    for n in range(20):
        question = [SYSTEM, user(f"{n}. What is behind a space? {stopped}")]
        whole = server.chat(question, headers=tenant("whole"), **params)
        pieces = spoken(whole, tokenizer)
        if len(set(pieces)) == len(pieces):
            break
    assert whole.text == "".join(pieces).replace("Ġ", " ")[1:]
    position, stop = stop_word(pieces, tokenizer)
    if stopped:
        params["stop"] = [stop]
    first = server.chat(question, headers=tenant(f"space-{stopped}"), **params)
    assert whole.text.startswith(first.text)
    assert first.finish_reason == ("stop" if stopped else "length")
    assert first.completion_tokens == (position + 1 if stopped else 12)
    talk = [*question, said(first), user("And?")]
    more = server.chat(talk, headers=tenant(f"space-{stopped}"), max_tokens=5)
    assert more.cached_tokens == first.prompt_tokens + (position if stopped else 12)


def assert_as_cold(server: ServerProcess, reply: Reply, messages: list[Message]) -> None:
    """Check that the same prompt, computed from its start, gives the same reply."""
    cold = server.chat(messages, headers=tenant(f"cold-{reply.raw['id']}"), max_tokens=5)
    assert (cold.cached_tokens, cold.text) == (0, reply.text)


@pytest.mark.parametrize("prompt", [["one", "two"], [], ""], ids=["list", "empty-list", "empty"])
def test_empty_prompts_and_lists_of_prompts_are_refused(server: ServerProcess, prompt: Any) -> None:
    status, _, body = server.request("POST", "/v1/completions", {"prompt": prompt})
    assert status == 400
    assert json.loads(body)["error"]
    assert server.healthy()
    assert server.complete(f"after {prompt}", max_tokens=3).completion_tokens == 3


def test_request_without_messages_is_refused(server: ServerProcess) -> None:
    status, _, body = server.request("POST", "/v1/chat/completions", {"messages": []})
    assert (status, bool(json.loads(body)["error"])) == (400, True)
    assert server.chat([user("Still there?")], max_tokens=3).completion_tokens == 3


# Options of a request.


def test_restored_prompt_gives_the_logprobs_of_a_computed_one(server: ServerProcess) -> None:
    question = [SYSTEM, user("How likely?")]
    params: dict[str, Any] = {"max_tokens": 8, "logprobs": True, "headers": tenant("probable")}
    cold, warm = (server.chat(question, **params) for _ in range(2))
    assert (cold.cached_tokens, warm.cached_tokens) == (0, warm.prompt_tokens - 1)
    before, after = (reply.raw["choices"][0]["logprobs"]["content"] for reply in (cold, warm))
    assert len(before) == 8
    assert [token["id"] for token in before] == [token["id"] for token in after]
    assert all(abs(a["logprob"] - b["logprob"]) < 0.01 for a, b in zip(before, after, strict=True))
    top = server.chat(question, "probable", max_tokens=4, top_logprobs=3)
    content = top.raw["choices"][0]["logprobs"]["content"]
    assert [len(token["top_logprobs"]) for token in content] == [3] * 4


def test_changed_tools_end_reuse(server: ServerProcess) -> None:
    question = [SYSTEM, user("Wave!")]
    first = server.chat(question, "tools", tools=[TOOL])
    without = server.chat(question, "tools")
    assert without.prompt_tokens < first.prompt_tokens
    assert without.cached_tokens < without.prompt_tokens - 5
    talk = [*question, said(first), user("Again!")]
    more = server.chat(talk, "tools", tools=[TOOL], stream=True)
    assert more.cached_tokens == n_total(first)
    renamed = {**TOOL, "function": {"name": "nod", "parameters": {}}}
    other = server.chat(talk, "tools", tools=[renamed])
    # The common part is restored, or computed if that is quicker.
    outcome = other.kvpersist["outcome"], other.kvpersist.get("reason")
    assert outcome[0] == "DIVERGE" or outcome == ("MISS", "diverged")
    assert other.cached_tokens < first.prompt_tokens - without.prompt_tokens


def test_identical_concurrent_requests_get_equal_replies(server: ServerProcess) -> None:
    system: Message = {"role": "system", "content": synthetic_text(700, seed=33)}
    question = [system, user("All at once?")]
    with ThreadPoolExecutor(3) as pool:
        replies = list(pool.map(lambda n: server.chat(question, "thrice"), range(3)))
    assert len({reply.text for reply in replies}) == 1
    again = server.chat(question, "thrice")
    assert again.text == replies[0].text
    assert again.cached_tokens == again.prompt_tokens - 1
    talk = [*question, said(again), user("More?")]
    assert server.chat(talk, "thrice").cached_tokens == n_total(again)


def test_namespaces_share_no_blocks(server: ServerProcess) -> None:
    question = [SYSTEM, user("Whose is this?")]
    for name in ("red", "blue"):
        reply = server.chat(question, "ns", headers=tenant(name))
        assert (reply.cached_tokens, reply.kvpersist["outcome"]) == (0, "MISS")
        assert newest(server)["namespace"] == name
    for name in ("red", "blue"):
        reply = server.chat(question, "ns", headers=tenant(name))
        assert reply.cached_tokens == reply.prompt_tokens - 1


# Options of the server.


def test_turns_are_reused_without_batches_and_in_small_prefill_steps(
    started: StartServer, tiny_model: Path, tmp_path: Path
) -> None:
    """A batch has one row, and a prefill step has at most seven tokens."""
    sizes = ("--prompt-concurrency", "1", "--decode-concurrency", "1", "--prefill-step-size", "7")
    options = (
        "--plugin",
        "kvpersist",
        "--kvpersist-dir",
        str(tmp_path / "store"),
        *sizes,
    )
    server = started(tiny_model, *options)
    talks = [[SYSTEM, user(f"{n}. One at a time?")] for n in range(3)]
    with ThreadPoolExecutor(3) as pool:
        first = list(pool.map(lambda talk: server.chat(talk, max_tokens=15), talks))
    for talk, reply in zip(talks, first, strict=True):
        talk += [said(reply), user("And then?")]
    with ThreadPoolExecutor(3) as pool:
        more = list(pool.map(lambda talk: server.chat(talk, max_tokens=15), talks))
    assert [reply.cached_tokens for reply in more] == [n_total(reply) for reply in first]
    assert "Traceback" not in server.log
    server.stop()


@pytest.fixture(scope="module")
def cramped(
    started: StartServer, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    """A server with a RAM budget of 0, and a namespace for each API key."""
    store = tmp_path_factory.mktemp("cramped")
    plugin = (
        "--plugin",
        "kvpersist",
        "--kvpersist-dir",
        str(store),
    )
    options = ("--kvpersist-ram", "0", "--kvpersist-namespace-by-key")
    return started(tiny_model, *plugin, *options), store


def test_without_ram_conversations_are_restored_from_disk(
    cramped: tuple[ServerProcess, Path],
) -> None:
    """The RAM budget is 0."""
    server, store = cramped
    talks: dict[str, list[Message]] = {
        name: [{"role": "system", "content": name + synthetic_text(200)}] for name in ("a", "b")
    }
    before = {"a": 0, "b": 0}
    for n in range(3):
        for name, talk in talks.items():
            talk.append(user(f"{n}. Is there room?"))
            reply = server.chat(talk, name, max_tokens=10)
            assert reply.cached_tokens >= before[name]
            assert (reply.kvpersist["tier"] == "disk") == (n > 0)
            talk.append(said(reply))
            before[name] = n_total(reply)
            wait_for_commit(store, name, before[name])
    stats = json.loads(server.request("GET", "/v1/kvpersist/stats")[2])["store"]
    assert stats["tiers"]["ram"]["max_bytes"] == 0
    wait_until(lambda: ram_bytes(server) == 0, "RAM within its budget")


def ram_bytes(server: ServerProcess) -> int:
    stats = json.loads(server.request("GET", "/v1/kvpersist/stats")[2])
    return int(stats["store"]["tiers"]["ram"]["bytes"])


def test_each_api_key_has_its_own_namespace(cramped: tuple[ServerProcess, Path]) -> None:
    server, store = cramped
    question = [SYSTEM, user("Whose key is this?")]
    keys = [{"Authorization": "Bearer one"}, {"x-api-key": "two"}, {}]
    for n, headers in enumerate(keys):
        reply = server.chat(question, f"key-{n}", headers=headers, max_tokens=5)
        assert (reply.cached_tokens, reply.kvpersist["outcome"]) == (0, "MISS")
        wait_for_commit(store, f"key-{n}", n_total(reply))
    for headers in keys:
        reply = server.chat(question, headers=headers, max_tokens=5)
        assert reply.cached_tokens == reply.prompt_tokens - 1
    names = {r["namespace"] for r in json.loads(server.request("GET", "/v1/kvpersist/requests")[2])}
    assert not any("one" in name or "two" in name for name in names)


def test_request_for_a_missing_model_keeps_the_loaded_model(server: ServerProcess) -> None:
    """Loading fails, and the loaded model serves the next request."""
    question = [SYSTEM, user("Which model?")]
    first = server.chat(question, max_tokens=5)
    with pytest.raises(ServerError, match="404"):
        server.chat(question, model="/no/such/model")
    again = server.chat(question, max_tokens=5)
    assert (again.text, again.cached_tokens) == (first.text, first.prompt_tokens - 1)


# The server without the plugin.


def test_package_is_not_imported_unless_the_plugin_is_selected(
    started: StartServer, tiny_model: Path, tmp_path: Path
) -> None:
    """Replies are the same whether or not the package is installed."""
    bare = make_environment(tmp_path / "venv")
    assert bare.run("python", "-c", "import mlx_lm_kvpersist").returncode == 1
    talk = [SYSTEM, user("Who answers?")]
    texts = []
    for options in ({}, {"python": str(bare.python), "cwd": tmp_path}):
        stock = started(tiny_model, env={"PYTHONPROFILEIMPORTTIME": "1"}, **options)
        reply = stock.chat(talk, max_tokens=40)
        texts.append((reply.text, reply.usage))
        assert "x-kvpersist" not in reply.headers
        stock.stop()
        assert "| " in stock.log and "mlx_lm.server" in stock.log
        assert "mlx_lm_kvpersist" not in stock.log
    assert texts[0] == texts[1]
    command = [sys.executable, "-X", "importtime", "-m", "mlx_lm.server", "--plugin", "kvpersist"]
    with_plugin = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True)
    assert "mlx_lm_kvpersist._startup" in with_plugin.stderr  # the check detects an import
