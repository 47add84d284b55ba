"""Replies come back in other words: put the model's own in their place.

What a client sends back is not always what the model said. The server's streaming detokenizer
drops a space at the start of a reply; tool calls are parsed, and serialised anew by the client;
templates trim. Then the rendered text parts from the stored one inside of the reply. So a reply
that cannot be told from its text is remembered under the conversation that led to it. When it
comes back, equal in text and its tool calls equal as JSON, the prompt is rendered with a mark in
its place, and the mark is replaced by the text that the model's ids decode to.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from ..match.keys import Root, pack_ids, unpack_ids
from ..store.block_store import BlockStore
from ..store.index import StoredReply
from .model import LoadedModel

Messages = list[dict[str, Any]]


class Conversation:
    """A hash over the messages so far, whatever form their client chose for them."""

    def __init__(self) -> None:
        self._digest = blake2b(digest_size=16, person=b"kvpersist-talk-1")

    def add(self, message: dict[str, Any]) -> None:
        plain = [message.get("role"), *_content_of(message)]
        encoded = json.dumps(plain, default=str).encode()
        self._digest.update(len(encoded).to_bytes(8, "little") + encoded)

    def with_reply(self, message: dict[str, Any]) -> bytes:
        """Return the key of this reply at this point of the conversation."""
        digest = self._digest.copy()
        digest.update(json.dumps(_content_of(message), default=str).encode())
        return digest.digest()


@dataclass(frozen=True)
class KnownReply:
    """A message, by its index, that repeats a reply; `ids` are the reply's, its end token not."""

    index: int
    ids: list[int]


def read_conversation(
    messages: Messages, root: Root, store: BlockStore
) -> tuple[Conversation, list[KnownReply]]:
    """Return the conversation's hash, and the messages that repeat a remembered reply."""
    conversation = Conversation()
    known = []
    for index, message in enumerate(messages):
        if message.get("role") == "assistant":
            packed = store.reply_ids(root.key, conversation.with_reply(message))
            if packed is not None:
                known.append(KnownReply(index, unpack_ids(packed)))
        conversation.add(message)
    return conversation, known


def reply_to_remember(
    conversation: Conversation, ids: list[int], message: dict[str, Any], model: LoadedModel
) -> StoredReply | None:
    """Return a reply to remember, or None when its message says what its ids mean, or more.

    `message` is the reply as the client got it. A reply that a stop word ended, or that had
    reasoning, is not the whole of its ids.
    """
    if model.text is None or message.get("reasoning") or not ids:
        return None
    ended = ids[-1] in model.tokenizer.eos_token_ids
    ids = ids[:-1] if ended else ids
    if not model.text.covers(ids):
        return None
    content = message.get("content") or ""
    if message.get("tool_calls"):
        if not ended:
            return None
    else:
        said = model.text.decode(ids)
        # A template may trim what stands at its ends.
        if content == said == said.strip() or content not in _streamed(ids, model):
            return None
    return StoredReply(conversation.with_reply(message), pack_ids(ids))


def respell(
    messages: Messages,
    known: Sequence[KnownReply],
    render: Callable[[Messages], str],
    model: LoadedModel,
) -> str | None:
    """Render messages with the known replies as the model said them.

    None when the template does more with a reply than to put it in its place: when what comes
    before, between and after the replies would not stay as it is.
    """
    if model.text is None or not all(model.text.covers(reply.ids) for reply in known):
        return None
    marks = {reply.index: f"\ue000reply-{reply.index}\ue001" for reply in known}
    marked = [
        {"role": message["role"], "content": marks[i]} if i in marks else message
        for i, message in enumerate(messages)
    ]
    rest = render(marked)
    pieces = []
    for mark in marks.values():
        piece, found, rest = rest.partition(mark)
        if not found:
            return None
        pieces.append(piece)
    pieces.append(rest)
    if not _stand_in_order(pieces, render(messages)):
        return None
    spelled = [model.text.decode(reply.ids) for reply in known]
    return "".join(piece + reply for piece, reply in zip(pieces, [*spelled, ""], strict=True))


def _stand_in_order(pieces: Sequence[str], text: str) -> bool:
    """Say whether `text` is the pieces, in order, with something in between."""
    first, *middle, last = pieces
    if not text.startswith(first) or not text.endswith(last):
        return False
    position, end = len(first), len(text) - len(last)
    for piece in middle:
        position = text.find(piece, position, end)
        if position < 0:
            return False
        position += len(piece)
    return position <= end


def _streamed(ids: list[int], model: LoadedModel) -> set[str]:
    """Return what the server's streaming detokenizer makes of ids.

    At the end of a reply it holds back what is incomplete, which mlx-lm 0.31.3 then never sends.
    """
    detokenizer = model.tokenizer.detokenizer
    for token_id in ids:
        detokenizer.add_token(token_id)
    texts = {detokenizer.text}
    detokenizer.finalize()
    return texts | {detokenizer.text}


def _content_of(message: dict[str, Any]) -> list[Any]:
    """Return a message's text and tool calls, in a form that equal ones share."""
    content = message.get("content")
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" for part in content
    ):
        content = "".join(str(part.get("text")) for part in content)
    calls = [_call_of(call) for call in message.get("tool_calls") or ()]
    return [content or "", calls]


def _call_of(call: Any) -> list[Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return [call]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            pass
    return [function.get("name"), json.dumps(arguments, sort_keys=True, default=str)]
