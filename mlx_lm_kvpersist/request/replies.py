"""A reply that a client sends back is fed as the ids that the model produced.

The rule: the prompt that the model reads is, byte for byte, what the template renders from the
conversation. There is one exception. A reply may be fed as the model's own ids, if

1. the client sent back the content and the tool calls that it was sent for these ids;
2. the prompt before the reply reads as it did when the model produced the ids, character for
   character: bytes of the model that are no character read as clients see them, as U+FFFD;
3. what the template renders from there to the next end token is the same reply: the same text
   but for white space and Unicode normalisation, reasoning included, and the same tool calls;
4. the reply's ids begin and end with the white space that is rendered there, so that none which
   the template writes is lost or doubled.

Everything else stays as rendered. Rendering and ids differ because the server's detokenizer drops
a leading space, the server parses tool calls and the template serialises them anew, templates
trim, and tokenizers normalise. Where they cannot differ, nothing is remembered: text matching
finds the ids.
"""

from __future__ import annotations

import json
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from ..host.prompt import Prompt
from ..match.block import Root, pack_ids, unpack_ids
from ..match.text import REPLACEMENT
from ..store.block_store import BlockStore
from ..store.index import StoredReply
from ..store.records import Turn
from .lookup import with_ids
from .model import LoadedModel

Message = dict[str, Any]
_DIGEST_BYTES = 16


@dataclass(frozen=True)
class _Reply:
    """The ids of a reply, as far as it was sent; size and digest of the text of its prompt."""

    ids: list[int]
    n_prompt_bytes: int
    prompt_digest: bytes

    def to_bytes(self) -> bytes:
        return self.prompt_digest + self.n_prompt_bytes.to_bytes(8, "little") + pack_ids(self.ids)

    @classmethod
    def from_bytes(cls, packed: bytes) -> _Reply:
        start = _DIGEST_BYTES + 8
        n_prompt_bytes = int.from_bytes(packed[_DIGEST_BYTES:start], "little")
        return cls(unpack_ids(packed[start:]), n_prompt_bytes, packed[:_DIGEST_BYTES])


def remember(
    messages: Sequence[Message],
    prompt: Sequence[int],
    reply: Sequence[int],
    sent: Message,
    root: Root,
    store: BlockStore,
    model: LoadedModel,
) -> None:
    """Remember a whole reply, unless text matching will find it. Any thread.

    `messages` were rendered to `prompt`. The model answered with the ids `reply`, for which the
    client was `sent` content, reasoning and tool calls.
    """
    if model.text is None or not reply or not messages:
        return
    if not model.text.covers((*prompt, *reply)):
        return
    ended = reply[-1] in model.tokenizer.eos_token_ids
    ids = list(reply[:-1] if ended else reply)
    text, content = model.text.decode(ids), sent.get("content") or ""
    if not ended:
        start = _shown(text).rfind(_shown(content))
        end = start + len(content)
        if start < 0 or sent.get("tool_calls") or text[end:].strip(" " + REPLACEMENT):
            return  # a stop word was cut off
        # mlx-lm 0.31.3 does not send a space or broken characters at the end of such a reply.
        ids = ids[: bisect_right(model.text.ends(ids), (end, False))]
    if text == content == text.strip() and unicodedata.is_normalized("NFC", text):
        return
    before = model.text.decode(prompt).encode()
    made = _Reply(ids, len(before), blake2b(before, digest_size=_DIGEST_BYTES).digest())
    *_, key = _reply_keys([*messages, {**sent, "role": "assistant"}])
    store.save_turn(Turn(root, (), None, (StoredReply(key, made.to_bytes()),)), [])


def respell(
    prompt: Prompt,
    messages: Sequence[Message],
    root: Root,
    store: BlockStore,
    model: LoadedModel,
) -> Prompt:
    """Return the prompt that `messages` were rendered to, its replies fed as the model's own ids.

    Replies to which the rule does not apply stay as they were rendered.
    """
    tokens = model.text
    if tokens is None:
        return prompt
    stored = [store.reply_ids(root.key, key) for key in _reply_keys(messages)]
    replies = [_Reply.from_bytes(packed) for packed in stored if packed is not None]
    if not replies or not tokens.covers(prompt.ids):
        return prompt
    read = memoryview(tokens.to_bytes(prompt.ids))
    ends = [0, *tokens.n_bytes_ends(prompt.ids)]
    turn_ends = [i for i, n in enumerate(prompt.ids) if n in model.tokenizer.eos_token_ids]
    turn_ends.append(len(prompt.ids))
    before = blake2b(digest_size=_DIGEST_BYTES)
    n_bytes = 0  # that `before` has hashed
    ids: list[int] = []
    n_read = 0  # tokens of the prompt that `ids` stand for
    boundaries: dict[int, int] = {}

    def copy_up_to(stop: int) -> None:
        boundaries.update((i, len(ids) + i - n_read) for i in range(n_read, stop + 1))
        ids.extend(prompt.ids[n_read:stop])

    for reply in replies:
        start = bisect_left(ends, ends[n_read] + reply.n_prompt_bytes - n_bytes, n_read)
        if start >= len(ends):
            continue
        stop = turn_ends[bisect_left(turn_ends, start)]
        up_to = before.copy()
        up_to.update(read[ends[n_read] : ends[start]])
        if up_to.digest() != reply.prompt_digest or not _is_same(
            tokens.decode(prompt.ids[start:stop]), tokens.decode(reply.ids), model.tokenizer
        ):
            continue
        copy_up_to(start)
        ids += reply.ids
        n_read = stop
        own = tokens.decode(reply.ids).encode()
        up_to.update(own)
        before, n_bytes = up_to, reply.n_prompt_bytes + len(own)
    copy_up_to(len(prompt.ids))
    return with_ids(prompt, ids, boundaries)


def _is_same(rendered: str, own: str, tokenizer: Any) -> bool:
    """Tell whether a template rendered this reply, without white space that is not in the reply."""
    lead, tail = _blank_ends(rendered)
    own_lead, own_tail = _blank_ends(own)
    if not own_lead.endswith(lead) or not own_tail.startswith(tail):
        return False
    one, other = (unicodedata.normalize("NFC", _shown(text)) for text in (rendered, own))
    return list(_parts(one, tokenizer)) == list(_parts(other, tokenizer))


def _shown(text: str) -> str:
    """Return text as clients see it: mlx-lm shows a byte 0 as the character U+0100."""
    return text.replace("\0", "\u0100")


def _blank_ends(text: str) -> tuple[str, str]:
    return text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]


def _parts(text: str, tokenizer: Any) -> Iterator[str]:
    """Yield a reply's text without white space and its tool calls, in a form for comparison.

    The server's own parser reads the calls. One that it cannot read is text.
    """
    start, end = tokenizer.tool_call_start, tokenizer.tool_call_end
    content, *calls = text.split(start) if start else [text]
    yield "".join(content.split())
    for call in calls:
        arguments, _, content = call.partition(end) if end else (call, "", "")
        try:
            yield json.dumps(tokenizer.tool_parser(arguments, None), sort_keys=True, default=str)
        except Exception:
            yield arguments
        yield "".join(content.split())


def _reply_keys(messages: Sequence[Message]) -> Iterator[bytes]:
    """Yield the key of each assistant message: a hash over the messages up to it.

    The key does not depend on the form in which a client sends content, nor on reasoning.
    """
    digest = blake2b(digest_size=_DIGEST_BYTES, person=b"kvpersist-talk-2")
    for message in messages:
        content = message.get("content")
        if isinstance(content, list) and all(
            isinstance(part, dict) and part.get("type") == "text" for part in content
        ):
            content = "".join(str(part.get("text")) for part in content)
        calls = [_call_of(call) for call in message.get("tool_calls") or ()]
        encoded = json.dumps([message.get("role"), content or "", calls], default=str).encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
        if message.get("role") == "assistant":
            yield digest.digest()


def _call_of(call: Any) -> list[Any]:
    """Return a message's tool call in a form for comparison."""
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
