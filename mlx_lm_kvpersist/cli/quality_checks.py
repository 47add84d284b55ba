"""Effects of a KV precision that users see: the next tokens of a text, replies, tool calls."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import takewhile
from typing import Any, Literal

import mlx.core as mx
from mlx_lm.generate import generate_step
from mlx_lm.models.cache import make_prompt_cache

from ..cache.geometry.precision import PrecisionChoice
from ..cache.geometry.spec import ModelCacheSpec, architecture_of, spec_of
from ..cache.live.attention import Strategy
from ..cache.live.packed import GRID
from ..cache.measuring.attention_check import plan_attention
from ..cache.measuring.divergence import AT_ONCE, Predictions, compared, encode
from ..host.patching.patches import PATCHES, PatchSet

MakeCache = Callable[[], list[Any]]

FIRST_TOKENS = 16
"""Two replies count as the same if this number of first tokens is equal."""

Window = tuple[list[int], int]
"""Ids, and the number of context ids at their start. The rest is predicted."""

THINGS = {"tin box": "48213", "brass key": "70964", "green boat": "15387"}
"""Facts to hide in a text, e.g. "The number of the keeper's tin box is 48213"."""
QUESTIONS = (
    *(f"What is the number of the keeper's {thing}? Give the number." for thing in THINGS),
    "What is this text about? Answer in one sentence.",
    "Which names of people or things occur in it?",
    "How does it begin?",
    "How does it end?",
    "Write a title for it.",
)
LOCKS = ("Harrow Weir", "Upper Dunmere", "Saltmarsh Cut", "Old Mill Bend")
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_water_level",
        "description": "Return the height of the water at a lock.",
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


@contextmanager
def server_attention() -> Iterator[None]:
    """Let caches use their own attention function, as in the server."""
    patches = PatchSet()
    patches.apply([patch for patch in PATCHES if patch.name == "attention"])
    try:
        yield
    finally:
        patches.undo()


def served(
    model: Any, choice: PrecisionChoice, attention: Strategy | Literal["auto"] = "auto"
) -> ModelCacheSpec:
    """Return a model's spec with its attention plans; "auto" plans as a server does.

    Raises ModelNotSupported if the model's cache is not supported.
    """
    facts = architecture_of(model)
    spec = spec_of(model, choice, facts)
    return plan_attention(model, spec, attention, facts is not None and facts.packed)


def windows_of(ids: Sequence[int], begin: Sequence[int], length: int, stride: int) -> list[Window]:
    """Cut ids into windows of `length`: `begin`, then ids from 0, `stride`, 2 * `stride` and so on.

    Every token is predicted once; the first token only if there is a `begin`. Before a token, the
    model sees at least `length - stride` tokens, or all if there are fewer.
    """
    room = length - len(begin)
    windows: list[Window] = []
    done, start = 0 if begin else 1, 0
    while done < len(ids):
        stop = min(start + room, len(ids))
        windows.append(([*begin, *ids[start:stop]], len(begin) + done - start))
        done, start = stop, start + stride
    return windows


def predicted(
    model: Any, ids: Sequence[int], makers: Mapping[str, MakeCache]
) -> dict[str, Predictions]:
    """Return the model's predictions of a text with the caches of each maker."""
    read = {name: Predictions() for name in makers}
    own, caches = make_prompt_cache(model), {name: make() for name, make in makers.items()}
    for start in range(0, len(ids) - 1, AT_ONCE):
        predictions = compared(model, ids[start : start + AT_ONCE + 1], own, caches)
        for name, new in predictions.items():
            read[name].add(new)
        mx.clear_cache()
    return read


def replies_to(
    model: Any,
    prompts: Sequence[Sequence[int]],
    make_cache: MakeCache,
    max_tokens: int,
    ends: set[int],
) -> list[list[int]]:
    """Return the greedy reply to each prompt; a reply stops before a token in `ends`.

    The prompts' common beginning is computed once, up to a multiple of `GRID` tokens.
    """
    step = partial(generate_step, model=model, prefill_step_size=GRID)
    alike = takewhile(lambda ids: len(set(ids)) == 1, zip(*(p[:-1] for p in prompts), strict=False))
    n_shared = len(list(alike)) // GRID * GRID
    shared = make_cache()
    if n_shared:
        list(step(mx.array(list(prompts[0][:n_shared])), prompt_cache=shared, max_tokens=0))
    replies = []
    for prompt in prompts:
        rest, caches = mx.array(list(prompt[n_shared:])), copy.deepcopy(shared)
        tokens = step(rest, prompt_cache=caches, max_tokens=max_tokens)
        replies.append([*takewhile(lambda id: id not in ends, (int(token) for token, _ in tokens))])
    return replies


def document_with_facts(tokenizer: Any, text: str, n_tokens: int) -> str:
    """Return about `n_tokens` of a text, repeated if it is too short, with all `THINGS` in it."""
    ids = encode(tokenizer, text)[1]
    joined: str = tokenizer.decode([ids[n % len(ids)] for n in range(n_tokens)])
    joined = joined[: _word_end(joined, len(joined))].rstrip("\ufffd")
    document, start = "", 0
    for place, (thing, number) in enumerate(THINGS.items()):
        share = 0.1 + 0.8 * place / (len(THINGS) - 1)
        stop = _word_end(joined, int(len(joined) * share))
        document += f"{joined[start:stop]} The number of the keeper's {thing} is {number}. "
        start = stop
    return document + joined[start:].lstrip(" ")


def _word_end(text: str, at: int) -> int:
    """Return the place of the last blank before `at`; if it is over 100 characters away, `at`."""
    blank = text.rfind(" ", max(0, at - 100), at + 1)
    return at if blank < 0 else blank


def prompt_of(tokenizer: Any, content: str) -> list[int]:
    """Return the ids of a user's message, in the chat template if there is one."""
    if tokenizer.has_chat_template:
        return _rendered(tokenizer, [{"role": "user", "content": content}], None)
    return list(tokenizer.encode(f"{content}\n"))


def _rendered(tokenizer: Any, messages: list[dict[str, Any]], tools: Any) -> list[int]:
    return list(tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True))


def tool_prompts(tokenizer: Any, text: str) -> list[tuple[list[int], Any]]:
    """Return a chain: the ids of each prompt, and the tool call that should follow.

    Each prompt contains the earlier calls. The chain is empty if the template omits tools, and has
    one prompt if the template omits calls.
    """
    content = f"{text}\n\nHow many metres high is the water at each of these locks: "
    content += f"{', '.join(LOCKS)}? Use the tool for one after the other, in this order."
    messages: list[dict[str, Any]] = [{"role": "user", "content": content}]
    chain: list[tuple[list[int], Any]] = []
    if not tokenizer.has_chat_template:
        return chain
    for number, lock in enumerate(LOCKS):
        call = {"name": "get_water_level", "arguments": {"lock": lock, "unit": "metres"}}
        try:
            prompt = _rendered(tokenizer, messages, [TOOL])
            if prompt in (_rendered(tokenizer, messages, None), *(earlier for earlier, _ in chain)):
                break
        except Exception:
            break  # templates raise exceptions of many classes
        chain.append((prompt, call))
        called = {"id": f"call{number:05}", "type": "function", "function": call}
        messages.append({"role": "assistant", "content": "", "tool_calls": [called]})
        result = json.dumps({"lock": lock, "metres": 1.5 + number / 4})
        messages.append({"role": "tool", "tool_call_id": called["id"], "content": result})
    return chain


def tool_call_in(tokenizer: Any, reply: str) -> Any:
    """Return a reply's tool call in the model's format, or its first JSON object, or None."""
    if tokenizer.has_tool_calling and tokenizer.tool_call_start in reply:
        inner = reply.split(tokenizer.tool_call_start, 1)[1]
        if tokenizer.tool_call_end:  # some formats have no end
            inner = inner.split(tokenizer.tool_call_end, 1)[0]
        try:
            return json.loads(json.dumps(tokenizer.tool_parser(inner, [TOOL])))
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
