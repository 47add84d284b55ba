"""Remove fields of a request that change on every request without changing what a model reads."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import permutations
from typing import Any

Messages = list[dict[str, Any]]

BILLING_PREFIX = "x-anthropic-billing-header:"


def normalise(messages: Messages, tools: Any) -> None:
    """Normalise a request, in place. Tools that are no list stay."""
    drop_billing_line(messages)
    drop_cache_control([*messages, *(tools if isinstance(tools, list) else ())])
    unify_content(messages)
    share_reasoning(messages)


def drop_billing_line(messages: Messages) -> None:
    """Drop Claude Code's billing line: the first block, or line, of the first system message.

    The same words anywhere else are the user's text and stay.
    """
    match messages[:1]:
        case [{"role": "system", "content": str(text)}] if text.startswith(BILLING_PREFIX):
            messages[0]["content"] = text.partition("\n")[2]
        case [{"role": "system", "content": [{"text": str(text)}, *parts]}]:
            if text.startswith(BILLING_PREFIX):
                messages[0]["content"] = parts


def drop_cache_control(items: Iterable[Any]) -> None:
    """Drop `cache_control` from messages, their parts and tools: clients move it every turn.

    It is dropped where the API defines it, not inside a tool's own schema or arguments.
    """
    for item in items:
        if isinstance(item, dict):
            item.pop("cache_control", None)
            if isinstance(item.get("content"), list):
                drop_cache_control(item["content"])
            if isinstance(item.get("function"), dict):
                item["function"].pop("cache_control", None)


def unify_content(messages: Messages) -> None:
    """Replace content that is a single text part by its text: clients use either form."""
    for message in messages:
        match message.get("content"):
            case [{"type": "text", "text": str(text)}]:
                message["content"] = text


def share_reasoning(messages: Messages) -> None:
    """Give a message's reasoning both names: stock sends one, most templates read the other."""
    for message in messages:
        for name, second_name in permutations(("reasoning", "reasoning_content")):
            if isinstance(message.get(name), str) and message.get(second_name) is None:
                message[second_name] = message[name]
