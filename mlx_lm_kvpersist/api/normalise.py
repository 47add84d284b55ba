"""Remove fields of a request that change on every request without changing what a model reads.

The meaning stays as it is. These are not done: looking for `cch=` outside the billing line, editing
dates or paths, moving or joining reminders, trimming.
"""

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
    """Drop Claude Code's billing line: the first block of the first system message.

    Up to Claude Code 2.1.180 it changes with every request, since then with every conversation. Of
    content that is a string, only the first line is dropped. The same words anywhere else are the
    user's text and stay.
    """
    if not messages or messages[0].get("role") != "system":
        return
    content = messages[0].get("content")
    if isinstance(content, str):
        if content.startswith(BILLING_PREFIX):
            messages[0]["content"] = content.partition("\n")[2]
    elif isinstance(content, list) and content and isinstance(content[0], dict):
        text = content[0].get("text")
        if isinstance(text, str) and text.startswith(BILLING_PREFIX):
            messages[0]["content"] = content[1:]


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
        content = message.get("content")
        if (
            isinstance(content, list)
            and len(content) == 1
            and isinstance(content[0], dict)
            and content[0].get("type") == "text"
            and isinstance(content[0].get("text"), str)
        ):
            message["content"] = content[0]["text"]


def share_reasoning(messages: Messages) -> None:
    """Give a message's reasoning both names: stock sends one, most templates read the other."""
    for message in messages:
        for name, second_name in permutations(("reasoning", "reasoning_content")):
            if isinstance(message.get(name), str) and message.get(second_name) is None:
                message[second_name] = message[name]
