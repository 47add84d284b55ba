"""Replies whose text, as the client got it, is not what their ids decode to.

The server's streaming detokenizer drops a space at the start of a reply, for one. The client sends
back what it got, the template renders that, and the text parts from the stored one at the reply's
first character. So such replies are remembered under the conversation that led to them, and put
back before the next prompt is rendered.
"""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Any

from ..match.keys import Root, pack_ids, unpack_ids
from ..tiers.index import StoredReply
from ..tiers.store import BlockStore
from .model import LoadedModel


class Conversation:
    """A hash over the messages so far, in the form in which the client sent them."""

    def __init__(self) -> None:
        self._digest = blake2b(digest_size=16, person=b"kvpersist-talk-1")

    def add(self, message: dict[str, Any]) -> None:
        plain = {**message, "content": text_of(message.get("content"))}
        encoded = json.dumps(plain, sort_keys=True, default=str).encode()
        self._digest.update(len(encoded).to_bytes(8, "little") + encoded)

    def with_reply(self, content: str) -> bytes:
        """Return the key of a reply with this text at this point of the conversation."""
        digest = self._digest.copy()
        digest.update(content.encode("utf-8", "surrogatepass"))
        return digest.digest()


def text_of(content: Any) -> Any:
    """Return content that is nothing but text as a string, and any other as it is."""
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in content
    ):
        return "".join(part["text"] for part in content)
    return content


def restore_replies(
    messages: list[dict[str, Any]], root: Root, store: BlockStore, model: LoadedModel
) -> Conversation:
    """Put remembered replies back into `messages`, in place; return the conversation's hash."""
    conversation = Conversation()
    for message in messages:
        content = text_of(message.get("content"))
        original = dict(message)
        if model.text is not None and message.get("role") == "assistant" and _is_text(content):
            packed = store.reply_ids(root.key, conversation.with_reply(content))
            if packed is not None:
                message["content"] = model.text.decode(unpack_ids(packed))
        conversation.add(original)
    return conversation


def reply_to_remember(
    conversation: Conversation, ids: list[int], model: LoadedModel
) -> StoredReply | None:
    """Return a reply to remember, or None when its text says what its ids mean."""
    if model.text is None:
        return None
    if ids and ids[-1] in model.tokenizer.eos_token_ids:
        ids = ids[:-1]
    detokenizer = model.tokenizer.detokenizer
    for token_id in ids:
        detokenizer.add_token(token_id)
    detokenizer.finalize()
    sent: str = detokenizer.text
    if sent == model.text.decode(ids):
        return None
    return StoredReply(conversation.with_reply(sent), pack_ids(ids))


def _is_text(content: Any) -> bool:
    return isinstance(content, str) and content != ""
