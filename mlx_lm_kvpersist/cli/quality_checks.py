"""Measure what a KV precision costs in quality: next tokens of a text, a needle, a tool call.

Every precision runs through the same code, chunk by chunk, so that all but the newest tokens are
read back from the cache, as they are while the server decodes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from ..cache.packed import OWN_BITS, PrecisionChoice
from ..cache.spec import ModelCacheSpec
from ..errors import ModelNotSupported

Told = Callable[[], None]
"""Called when a piece of work is done."""

OWN = PrecisionChoice(OWN_BITS, OWN_BITS)
CHOICES: dict[str, PrecisionChoice] = {
    "16": OWN,
    "8": PrecisionChoice(8, 8),
    "k8v4": PrecisionChoice(8, 4),
    "4": PrecisionChoice(4, 4),
}
_TEXT_STEP = 128
_PREFILL_STEP = 512

SECRET = "48213"
NEEDLE = f" The number of the keeper's tin box is {SECRET}. "
NEEDLE_QUESTION = "What is the number of the keeper's tin box? Answer with the number."
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_water_level",
        "description": "Return the height of the water at a lock, in feet.",
        "parameters": {
            "type": "object",
            "properties": {
                "lock": {"type": "string", "description": "The name of the lock"},
                "unit": {"type": "string", "enum": ["feet", "metres"]},
            },
            "required": ["lock", "unit"],
        },
    },
}
TOOL_QUESTION = "How many metres high is the water at the lock of Harrow Weir? Use the tool."


def caches_for(model: Any, choice: PrecisionChoice) -> list[Any]:
    """Return one empty cache for each layer, for a sequence in this precision.

    Raises ModelNotSupported where nothing of this model can be quantized so.
    """
    if choice.is_own:
        return list(make_prompt_cache(model))
    return list(spec_for(model, choice).make_cache())


def spec_for(model: Any, choice: PrecisionChoice) -> ModelCacheSpec:
    """Return the geometry of a model's cache in this precision; raises ModelNotSupported."""
    return ModelCacheSpec.probe(model, choice, evaluate=False)


@dataclass(frozen=True)
class Window:
    """Token ids; the ones from `n_context` on are predicted."""

    ids: tuple[int, ...]
    n_context: int


@dataclass
class TextScore:
    """Sums over the `n_tokens` predicted tokens of a text."""

    n_tokens: int = 0
    nll: float = 0.0
    n_agreeing: int = 0
    divergence: float = 0.0

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.nll / self.n_tokens, 700.0))

    @property
    def agreement(self) -> float:
        """Share of the tokens for which the reference has the same likeliest token."""
        return self.n_agreeing / self.n_tokens

    @property
    def mean_divergence(self) -> float:
        """Mean Kullback-Leibler divergence from the reference, in nats."""
        return self.divergence / self.n_tokens


def windows_of(ids: Sequence[int], begin: Sequence[int], length: int, stride: int) -> list[Window]:
    """Cut ids into windows of `length`: `begin`, then a part that advances by `stride`.

    Every token but the first is predicted once, with at least `length - stride` tokens before it
    where the text has so many.
    """
    room = length - len(begin)
    windows: list[Window] = []
    done, start = 0 if begin else 1, 0
    while done < len(ids):
        stop = min(start + room, len(ids))
        windows.append(Window((*begin, *ids[start:stop]), len(begin) + done - start))
        done, start = stop, start + stride
    return windows


def n_text_steps(windows: Sequence[Window]) -> int:
    """Return how many times `score_text` calls `told`."""
    return sum(-(-(len(window.ids) - 1) // _TEXT_STEP) for window in windows)


def score_text(
    model: Any, windows: Sequence[Window], choices: Mapping[str, PrecisionChoice], told: Told
) -> dict[str, TextScore]:
    """Return each choice's score; the reference is a run of its own in the model's precision.

    The row of 16 bits therefore shows how well two equal runs agree.
    """
    scores = {name: TextScore() for name in choices}
    for window in windows:
        reference = caches_for(model, OWN)
        caches = {name: caches_for(model, choice) for name, choice in choices.items()}
        for start in range(0, len(window.ids) - 1, _TEXT_STEP):
            stop = min(start + _TEXT_STEP, len(window.ids) - 1)
            inputs = mx.array([window.ids[start:stop]])
            targets = mx.array(window.ids[start + 1 : stop + 1])
            # Position i predicts token i + 1.
            first = max(0, window.n_context - 1 - start)
            expected = _log_probabilities(model, inputs, reference)
            for name, score in scores.items():
                found = _log_probabilities(model, inputs, caches[name])
                if first < stop - start:
                    _add(score, expected[first:], found[first:], targets[first:])
            told()
    return scores


def _log_probabilities(model: Any, inputs: mx.array, caches: list[Any]) -> mx.array:
    logits = model(inputs, cache=caches)[0].astype(mx.float32)
    found: mx.array = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return found


def _add(score: TextScore, expected: mx.array, found: mx.array, targets: mx.array) -> None:
    nll = -mx.take_along_axis(found, targets[:, None], axis=-1).sum()
    n_agreeing = (expected.argmax(axis=-1) == found.argmax(axis=-1)).sum()
    divergence = (mx.exp(expected) * (expected - found)).sum()
    sums: Any = mx.stack([nll, n_agreeing.astype(mx.float32), divergence]).tolist()
    score.n_tokens += len(targets)
    score.nll += sums[0]
    score.n_agreeing += int(sums[1])
    score.divergence += sums[2]


def greedy(
    model: Any, ids: Sequence[int], choice: PrecisionChoice, max_tokens: int, ends: set[int]
) -> list[int]:
    """Return the greedy continuation of a prompt, up to one of `ends`, without it."""
    caches = caches_for(model, choice)
    for start in range(0, len(ids) - 1, _PREFILL_STEP):
        stop = min(start + _PREFILL_STEP, len(ids) - 1)
        model(mx.array([ids[start:stop]]), cache=caches)
        mx.eval([cache.state for cache in caches])
    said: list[int] = []
    last = ids[-1]
    while len(said) < max_tokens:
        last = int(model(mx.array([[last]]), cache=caches)[0, -1].argmax().item())
        if last in ends:
            break
        said.append(last)
    return said


def needle_prompts(
    tokenizer: Any, text: str, n_tokens: int, depths: Sequence[float]
) -> Iterator[tuple[float, list[int]]]:
    """Yield (depth, ids of about `n_tokens`): a text with a fact hidden at that share of it."""
    paragraphs = [part for part in text.split("\n") if part.strip()]
    n_wanted = max(16, n_tokens - len(prompt_of(tokenizer, NEEDLE + NEEDLE_QUESTION)))
    counts = [len(tokenizer.encode(part, add_special_tokens=False)) for part in paragraphs]
    filler: list[str] = []
    n_filled = 0
    while n_filled < n_wanted:
        n = len(filler) % len(paragraphs)
        filler.append(paragraphs[n])
        n_filled += counts[n] + 1
    joined = "\n".join(filler)
    joined = joined[: _word_end(joined, len(joined) * n_wanted // n_filled)]
    for depth in depths:
        at = _word_end(joined, int(len(joined) * depth))
        hidden = joined[:at] + NEEDLE + joined[at:].lstrip(" ")
        yield depth, prompt_of(tokenizer, f"{hidden}\n\n{NEEDLE_QUESTION}")


def _word_end(text: str, at: int) -> int:
    """Return the end of the word before `at`, or `at` in scripts without blanks."""
    blank = text.rfind(" ", max(0, at - 100), at + 1)
    return at if blank < 0 else blank


def prompt_of(tokenizer: Any, content: str, tools: list[dict[str, Any]] | None = None) -> list[int]:
    """Return the ids of a user's message, in the chat template where the model has one."""
    if getattr(tokenizer, "has_chat_template", False):
        messages = [{"role": "user", "content": content}]
        return list(
            tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True)
        )
    return list(tokenizer.encode(f"{content}\n"))


def takes_tools(tokenizer: Any) -> bool:
    """Say whether the chat template renders tools."""
    if not getattr(tokenizer, "has_chat_template", False):
        return False
    try:
        return prompt_of(tokenizer, TOOL_QUESTION, [TOOL]) != prompt_of(tokenizer, TOOL_QUESTION)
    except Exception:
        return False  # templates raise exceptions of many classes


def tool_call_in(tokenizer: Any, reply: str) -> Any:
    """Return the tool call in a reply as JSON values, or None without one.

    The model's own format is read where mlx-lm knows it, else the first JSON object.
    """
    start, end = (getattr(tokenizer, f"tool_call_{side}", None) for side in ("start", "end"))
    parse = getattr(tokenizer, "tool_parser", None)
    if getattr(tokenizer, "has_tool_calling", False) and parse and start and start in reply:
        inner = reply.split(start, 1)[1]
        inner = inner.split(end, 1)[0] if end else inner
        try:
            return json.loads(json.dumps(parse(inner, [TOOL])))
        except Exception:
            return None  # parsers raise exceptions of many classes
    decoder = json.JSONDecoder()
    for at, char in enumerate(reply):
        if char == "{":
            try:
                return decoder.raw_decode(reply, at)[0]
            except ValueError:
                continue
    return None


def quantizable(model: Any, choices: Mapping[str, PrecisionChoice]) -> dict[str, str | None]:
    """Return for each choice why no layer of this model takes its bits, None where one does."""
    reasons: dict[str, str | None] = {}
    for name, choice in choices.items():
        try:
            kept = [group.precision for group in spec_for(model, choice).full]
        except ModelNotSupported as error:
            reasons[name] = str(error)
            continue
        asked = (choice.key_bits, choice.value_bits)
        is_kept_so = (
            not any(kept)
            if choice.is_own
            else any(one and (one.keys.bits, one.values.bits) == asked for one in kept)
        )
        reasons[name] = None if is_kept_so else "not kept in these bits"
    return reasons
