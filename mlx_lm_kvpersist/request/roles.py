"""Messages in roles, or in an order, that a model's chat template cannot render.

Clients send a system message in mid-conversation, several of them, or one from a `developer`.
Some templates raise on these, leave them out, or move them to the front, where each new one would
change the whole prompt. Such a message becomes a part of the message before it. A template that
renders a message where it stands is left to do so: the plugin changes nothing then.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any

Message = dict[str, Any]

_CALL = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": {}}}
_MARKS = ("aa1zz", "bb2zz", "cc3zz", "dd4zz", "ee5zz", "ff6zz")
_USUAL = ("user", "assistant", "user")
_WITH_TOOL = ("user", "call", "tool", "assistant", "user")
_TRIED: dict[tuple[str, str], tuple[Sequence[str], Sequence[str]]] = {
    ("", "system"): (_USUAL, ("system", *_USUAL)),
    ("system", "system"): (("system", *_USUAL), ("system", "system", *_USUAL)),
    ("user", "system"): (_USUAL, ("user", "system", "assistant", "user")),
    ("assistant", "system"): (_USUAL, ("user", "assistant", "system", "user")),
    ("tool", "system"): (_WITH_TOOL, ("user", "call", "tool", "system", "assistant", "user")),
    ("user", "user"): (_USUAL, ("user", "user", "assistant", "user")),
    ("tool", "user"): (_WITH_TOOL, ("user", "call", "tool", "user", "assistant", "user")),
}
"""By the roles of two messages that follow each other: a conversation that a template must render
for the test to tell anything, and the one that has these two."""


@dataclass(frozen=True)
class TemplateRoles:
    """What a chat template cannot render: pairs of roles that may not follow each other."""

    refused: frozenset[tuple[str, str]] = frozenset()
    knows_developer: bool = False

    @classmethod
    def of(cls, tokenizer: Any) -> TemplateRoles:
        """Try a tokenizer's template on a few short conversations."""
        if not getattr(tokenizer, "has_chat_template", False):
            return cls()
        refused = {
            pair
            for pair, (usual, tried) in _TRIED.items()
            if _renders(tokenizer, usual) and not _renders(tokenizer, tried)
        }
        source = str(getattr(tokenizer, "chat_template", None) or "")
        return cls(frozenset(refused), "developer" in source)

    def fit(self, messages: list[Message]) -> None:
        """Change messages in place, so that the template renders them all, in their order.

        What is appended to a message stays there in later requests: prompts still only grow.
        """
        fitted: list[Message] = []
        for message in messages:
            if message.get("role") == "developer" and not self.knows_developer:
                message["role"] = "system"
            before = str(fitted[-1].get("role")) if fitted else ""
            pair = (before, str(message.get("role")))
            if pair not in self.refused:
                fitted.append(message)
                continue
            if pair[1] == "system" and before not in ("", "system"):
                message["content"] = _as_reminder(message.get("content"))
            if before in ("", "assistant"):
                fitted.append({**message, "role": "user"})
            else:
                _append(fitted[-1], message.get("content"))
        messages[:] = fitted


def share_reasoning(messages: list[Message]) -> None:
    """Give a message's reasoning both names: stock sends one, most templates read the other."""
    for message in messages:
        for name, other in permutations(("reasoning", "reasoning_content")):
            if isinstance(message.get(name), str) and message.get(other) is None:
                message[other] = message[name]


def _as_reminder(content: Any) -> Any:
    """Return a system message's content in the form in which Claude Code reminds a model."""
    start, end = "<system-reminder>\n", "\n</system-reminder>"
    if isinstance(content, list):
        return [*_parts(start), *content, *_parts(end)]
    return f"{start}{content or ''}{end}"


def _append(message: Message, content: Any) -> None:
    """Append content to that of a message, a paragraph apart."""
    before = message.get("content")
    if isinstance(before, list) or isinstance(content, list):
        message["content"] = [*_parts(before), *_parts("\n\n"), *_parts(content)]
    else:
        message["content"] = f"{before or ''}\n\n{content or ''}"


def _parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content or ""}]


def _renders(tokenizer: Any, roles: Sequence[str]) -> bool:
    """Tell whether a template renders messages of these roles, each of them in its place."""
    messages: list[Message] = []
    for role, mark in zip(roles, _MARKS, strict=False):
        message: Message = {"role": role, "content": mark}
        if role == "call":
            message = {"role": "assistant", "content": mark, "tool_calls": [_CALL]}
        elif role == "tool":
            message |= {"tool_call_id": "call00000", "name": "look"}
        messages.append(message)
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception:
        return False
    places = [str(text).find(mark) for mark in _MARKS[: len(roles)]]
    return -1 not in places and places == sorted(places)
