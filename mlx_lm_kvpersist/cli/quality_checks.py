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

from ..cache.geometry.precision import Estimate

OnProgress = Callable[[], None]
"""Called when a piece of work is done."""

MakeCache = Callable[[], list[Any]]
"""Returns an empty prompt cache."""

_TEXT_STEP = 128
_PREFILL_STEP = 256

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


@dataclass(frozen=True)
class Window:
    """Token ids; the ones from `n_context` on are predicted."""

    ids: tuple[int, ...]
    n_context: int


@dataclass
class TextScore:
    """Sums over the `n_tokens` predicted tokens of a text; `sums` has a value and its square each.

    They are the negative log-likelihood, how much it is above the reference's, and the
    Kullback-Leibler divergence from the reference, in nats.
    """

    n_tokens: int = 0
    n_agreeing: int = 0
    sums: tuple[float, ...] = (0.0,) * 6

    def _mean(self, which: int) -> Estimate:
        mean = self.sums[2 * which] / self.n_tokens
        square = self.sums[2 * which + 1] / self.n_tokens
        return Estimate(mean, math.sqrt(max(0.0, square - mean**2) / self.n_tokens))

    @property
    def perplexity(self) -> Estimate:
        nll = self._mean(0)
        value = math.exp(min(nll.value, 700.0))
        return Estimate(value, value * nll.error)

    @property
    def perplexity_rise(self) -> Estimate:
        """Share by which the perplexity is above the reference's."""
        above = self._mean(1)
        ratio = math.exp(min(above.value, 700.0))
        return Estimate(ratio - 1, ratio * above.error)

    @property
    def agreement(self) -> Estimate:
        """Share of the tokens for which the reference has the same likeliest token."""
        share = self.n_agreeing / self.n_tokens
        return Estimate(share, math.sqrt(share * (1 - share) / self.n_tokens))

    @property
    def divergence_nats(self) -> Estimate:
        return self._mean(2)


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
    """Return how many times `score_text` calls `on_progress`."""
    return sum(-(-(len(window.ids) - 1) // _TEXT_STEP) for window in windows)


def score_text(
    model: Any, windows: Sequence[Window], makers: Mapping[str, MakeCache], on_progress: OnProgress
) -> dict[str, TextScore]:
    """Return the score of each maker's caches; the reference is a run of its own.

    The row of the model's own precision therefore shows how well two equal runs agree.
    """
    scores = {name: TextScore() for name in makers}
    for window in windows:
        reference = make_prompt_cache(model)
        caches = {name: make_cache() for name, make_cache in makers.items()}
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
            on_progress()
    return scores


def _log_probabilities(model: Any, inputs: mx.array, caches: list[Any]) -> mx.array:
    logits = model(inputs, cache=caches)[0].astype(mx.float32)
    found: mx.array = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return found


def _add(score: TextScore, expected: mx.array, found: mx.array, targets: mx.array) -> None:
    nll = -mx.take_along_axis(found, targets[:, None], axis=-1)[:, 0]
    above = nll + mx.take_along_axis(expected, targets[:, None], axis=-1)[:, 0]
    divergence = (mx.exp(expected) * (expected - found)).sum(axis=-1)
    each = (nll, above, divergence)
    sums: Any = mx.stack([total for x in each for total in (x.sum(), (x * x).sum())]).tolist()
    score.n_tokens += len(targets)
    agreeing: Any = (expected.argmax(axis=-1) == found.argmax(axis=-1)).sum().item()
    score.n_agreeing += agreeing
    score.sums = tuple(old + new for old, new in zip(score.sums, sums, strict=True))


def greedy(
    model: Any, ids: Sequence[int], caches: list[Any], max_tokens: int, ends: set[int]
) -> list[int]:
    """Return the greedy continuation of a prompt, up to one of `ends`, without it."""
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
