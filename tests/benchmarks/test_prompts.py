"""Prompts have exactly the requested length, with every tokenizer."""

from __future__ import annotations

from pathlib import Path

import pytest
from mlx_lm.tokenizer_utils import load as load_tokenizer

from benchmarks.prompts import Prompts
from tests.support import Reply


@pytest.mark.parametrize("fixture", ["tiny_model", "tiny_model_bos", "tiny_model_spm"])
def test_prompts_have_exactly_the_requested_length(
    fixture: str, request: pytest.FixtureRequest
) -> None:
    model: Path = request.getfixturevalue(fixture)
    tokenizer = load_tokenizer(model)
    prompts = Prompts(tokenizer)
    for n_tokens in (64, 257, 1500):
        ids = [
            tokenizer.apply_chat_template(
                prompts.of_length(n_tokens, seed), add_generation_prompt=True
            )
            for seed in (1, 2)
        ]
        assert [len(prompt) for prompt in ids] == [n_tokens, n_tokens]
        n_shared = next(n for n, (a, b) in enumerate(zip(*ids, strict=True)) if a != b)
        assert n_shared < 16, "prompts of different seeds must not help each other"


def test_next_turn_adds_the_requested_number_of_tokens(tiny_model: Path) -> None:
    prompts = Prompts(load_tokenizer(tiny_model))
    messages = prompts.of_length(200, seed=1)
    reply = Reply("some words", "length", {}, {}, 0.0, 0.0, {})
    longer = prompts.next_turn(messages, reply, 64)
    assert longer[:2] == [*messages, {"role": "assistant", "content": "some words"}]
    n_reply_tokens = len(load_tokenizer(tiny_model).encode("some words", add_special_tokens=False))
    assert prompts.count(longer) == 200 + n_reply_tokens + 64


def test_a_length_shorter_than_the_template_is_refused(tiny_model: Path) -> None:
    with pytest.raises(ValueError, match="no text has exactly 3 tokens"):
        Prompts(load_tokenizer(tiny_model)).of_length(3, seed=1)
