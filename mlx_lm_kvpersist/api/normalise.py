"""Remove from a request what changes from turn to turn and means nothing to a model.

Only what cannot change meaning is done, each under a name of its own. Not done: looking for
`cch=` anywhere but in its line, editing dates or paths, moving or joining reminders, trimming.
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

    Up to 2.1.180 it changes with every request, later with every conversation. Of a string only
    that first line goes. Anywhere else the same words are somebody's text and stay.
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
    """Drop `cache_control` from messages, their parts and tools: where it stands moves."""
    for item in [*messages, *tools]:
        _drop_cache_control(item)


def _drop_cache_control(item: Any) -> None:
    """Drop the mark where the API has it, not inside of a tool's own schema or arguments."""
    if not isinstance(item, dict):
        return
    item.pop("cache_control", None)
    if isinstance(item.get("content"), list):
        for part in item["content"]:
            _drop_cache_control(part)
    if isinstance(item.get("function"), dict):
        item["function"].pop("cache_control", None)


def unify_content(messages: Messages, tools: Tools) -> None:
    """Write content of a single text part as that text: clients change between the two."""
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
"""By the name that `--kvpersist-normalise` knows them by, in the order in which they are done."""


def normalise(messages: Messages, tools: Tools | None, names: tuple[str, ...]) -> None:
    """Apply the named normalisations to a request, in place."""
    for name, function in NORMALISATIONS.items():
        if name in names:
            function(messages, tools or [])
