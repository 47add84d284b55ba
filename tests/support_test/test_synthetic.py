"""Tiny models resemble real models in tokenizer, template and replies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm import load
from mlx_lm.generate import generate_step

from tests.support.synthetic import TokenizerKind, make_tiny_model, synthetic_conversation
from tests.support.synthetic.conversation import corpus_lines

KINDS: list[TokenizerKind] = ["byte-level", "sentencepiece", "sentencepiece-legacy"]
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": " keep\tthis "},
    {"role": "user", "content": "  Grüße 🙂 東京\n\n"},
    {
        "role": "assistant",
        "content": " ok ",
        "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": {"city": "Köln"}}}],
    },
    {"role": "tool", "content": "\n{}\n"},
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bos", [False, True])
def test_tokenizer_round_trips_text_and_template_renders_messages(
    kind: TokenizerKind, bos: bool, tmp_path: Path
) -> None:
    _, tokenizer = load(str(make_tiny_model(tmp_path, tokenizer=kind, bos=bos, n_layers=1)))
    text = "\n".join(corpus_lines()) + "\nnever seen: ŷ ǆ 🦔 \x07"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids) == text
    assert len(ids) < 0.8 * len(text), "the tokenizer has learned no merges"
    streaming = tokenizer.detokenizer
    expected = "BPEStreaming" if kind == "byte-level" else "SPMStreaming"
    assert type(streaming).__name__.startswith(expected)
    for token in ids:
        streaming.add_token(token)
    streaming.finalize()
    assert streaming.text == text

    bos_ids = [tokenizer.bos_token_id] if bos else []
    assert tokenizer.encode("hi") == bos_ids + tokenizer.encode("hi", add_special_tokens=False)
    rendered = tokenizer.apply_chat_template(
        MESSAGES, tools=[{"name": "f"}], add_generation_prompt=True, tokenize=False
    )
    for message in MESSAGES:
        assert message["content"] in rendered
    assert '{"name": "f", "arguments": {"city": "Köln"}}' in rendered
    prompt = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True)
    assert prompt[:1] == bos_ids if bos else prompt[0] not in bos_ids
    assert prompt.count(tokenizer.bos_token_id) == len(bos_ids)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_replies_vary_and_have_no_special_tokens(
    kind: TokenizerKind, tmp_path: Path
) -> None:
    model, tokenizer = load(str(make_tiny_model(tmp_path, tokenizer=kind)))
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Tell me."}], add_generation_prompt=True
    )
    reply = [int(t) for t, _ in generate_step(mx.array(prompt), model, max_tokens=100)]
    assert len(set(zip(reply, reply[1:], reply[2:], strict=False))) > 60
    assert not set(reply) & set(tokenizer.all_special_ids)
    text = tokenizer.decode(reply)
    assert text.replace("\n", "").isprintable()
    assert "\ufffd" not in text


def test_equal_arguments_write_equal_files(tmp_path: Path) -> None:
    first = make_tiny_model(tmp_path / "a", tokenizer="sentencepiece")
    second = make_tiny_model(tmp_path / "b", tokenizer="sentencepiece")
    other = make_tiny_model(tmp_path / "c", tokenizer="sentencepiece", seed=1)
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        assert (first / name).read_bytes() == (second / name).read_bytes()
    weights = "model.safetensors"
    assert (first / weights).read_bytes() != (other / weights).read_bytes()


def test_make_tiny_model_supports_other_architectures(tmp_path: Path) -> None:
    sliding = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}
    model, _ = load(str(make_tiny_model(tmp_path / "llama", config=sliding)))
    assert [type(c).__name__ for c in model.make_cache()] == ["RotatingKVCache", "KVCache"]
    load(str(make_tiny_model(tmp_path / "qwen3", model_type="qwen3", dtype="bfloat16")))
    with pytest.raises(ValueError, match="no model type 'nonsense'"):
        make_tiny_model(tmp_path / "nonsense", model_type="nonsense")


def test_synthetic_conversation_has_the_requested_length() -> None:
    messages = synthetic_conversation(n_turns=3, n_chars=6000)
    assert [m["role"] for m in messages] == ["system", *["user", "assistant"] * 2, "user"]
    assert 5500 < sum(len(m["content"]) for m in messages) < 6500
    assert messages == synthetic_conversation(n_turns=3, n_chars=6000)
    assert messages != synthetic_conversation(n_turns=3, n_chars=6000, seed=1)
