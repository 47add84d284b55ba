"""Remove fields of a request that change on every request without changing what a model reads.

Each normalisation has a name and leaves the meaning as it is. These are not done: looking for
`cch=` outside the billing line, editing dates or paths, moving or joining reminders, trimming.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Messages = list[dict[str, Any]]
Tools = list[Any]
Normalise = Callable[[Messages, Tools], None]

BILLING_PREFIX = "x-anthropic-billing-header:"


def drop_billing_line(messages: Messages, tools: Tools) -> None:
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


def drop_cache_control(messages: Messages, tools: Tools) -> None:
    """Drop `cache_control` from messages, their parts and tools: clients move it every turn."""
    for item in [*messages, *tools]:
        _drop_cache_control(item)


def _drop_cache_control(item: Any) -> None:
    """Drop it where the API defines it, not inside a tool's own schema or arguments."""
    if not isinstance(item, dict):
        return
    item.pop("cache_control", None)
    if isinstance(item.get("content"), list):
        for part in item["content"]:
            _drop_cache_control(part)
    if isinstance(item.get("function"), dict):
        item["function"].pop("cache_control", None)


def unify_content(messages: Messages, tools: Tools) -> None:
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


NORMALISATIONS: dict[str, Normalise] = {
    "billing-line": drop_billing_line,
    "cache-control": drop_cache_control,
    "content": unify_content,
}
"""By their names in `--kvpersist-normalise`, in the order in which they are applied."""


def normalise(messages: Messages, tools: Any, names: tuple[str, ...]) -> None:
    """Apply the named normalisations to a request, in place. Tools that are no list stay."""
    listed = tools if isinstance(tools, list) else []
    for name, function in NORMALISATIONS.items():
        if name in names:
            function(messages, listed)
