"""A reply that a client sends back is fed as the ids that the model produced.

The rule: the prompt that the model reads is, byte for byte, what the template renders from the
conversation. There is one exception. A reply may be fed as the model's own ids, if

1. the client sent back the content and the tool calls that it was sent for these ids, or, of a
   reply that ended without an end token, a beginning of them: nobody knows how much of it a client
   has read that left, and max_tokens or a stop string cut some of what was produced;
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
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from ..block import Root, pack_ids, unpack_ids
from ..host.answers import Prompt
from ..match.text import TokenText
from ..store.block_store import BlockStore
from ..store.records import Commit
from .lookup import with_ids
from .model import LoadedModel

Message = dict[str, Any]
_DIGEST_BYTES = 16
_START = _DIGEST_BYTES + 1 + 8


@dataclass(frozen=True)
class _Reply:
    """The ids of a reply; size and digest of the text of its prompt.

    has_ended: whether the model ended it itself; else max_tokens, a stop string or its client did.
    """

    ids: list[int]
    has_ended: bool
    n_prompt_bytes: int
    prompt_digest: bytes

    def to_bytes(self) -> bytes:
        about = bytes([self.has_ended]) + self.n_prompt_bytes.to_bytes(8, "little")
        return self.prompt_digest + about + pack_ids(self.ids)

    @classmethod
    def from_bytes(cls, packed: bytes) -> _Reply:
        digest, about, ids = packed[:_DIGEST_BYTES], packed[_DIGEST_BYTES:_START], packed[_START:]
        return cls(unpack_ids(ids), bool(about[0]), int.from_bytes(about[1:], "little"), digest)


def remember(
    messages: Sequence[Message],
    prompt: Sequence[int],
    reply: Sequence[int],
    sent: Message | None,
    root: Root,
    store: BlockStore,
    model: LoadedModel,
) -> Collection[bytes]:
    """Remember a reply, unless text matching will find it; return by what keys. Any thread.

    `messages` were rendered to `prompt`. The model answered with the ids `reply`, for which the
    client was `sent` content, reasoning and tool calls; None if that is not known, or not yet. A
    reply without an end token is also found by its conversation alone, the newest one: its client
    may have read less of it.
    """
    if model.text is None or not reply or not messages:
        return ()
    has_ended = reply[-1] in model.tokenizer.eos_token_ids
    if has_ended and sent is None:
        return ()  # it is looked for by what was sent alone
    if not model.text.covers((*prompt, *reply)):
        return ()
    ids = list(reply[:-1] if has_ended else reply)
    if has_ended:
        text, content = model.text.decode(ids), (sent or {}).get("content") or ""
        if text == content == text.strip() and unicodedata.is_normalized("NFC", text):
            return ()
    *_, (key, key_begun) = _reply_keys([*messages, {**(sent or {}), "role": "assistant"}])
    keys = [key] if sent is not None else []
    keys += [] if has_ended else [key_begun]
    before = model.text.decode(prompt).encode()
    digest = blake2b(before, digest_size=_DIGEST_BYTES).digest()
    made = _Reply(ids, has_ended, len(before), digest).to_bytes()
    replies = dict.fromkeys(keys, made)
    store.commit(Commit(root, (), replies=replies, messages=messages), [])
    return keys


def known_replies(
    store: BlockStore, root: Root, messages: Sequence[Mapping[str, Any]]
) -> dict[bytes, bytes]:
    """Return what is remembered of the replies among messages, packed, by digest. Any thread."""
    return store.replies(root.key, [key for pair in _reply_keys(messages) for key in pair])


def retokenize(prompt: Prompt, root: Root, store: BlockStore, model: LoadedModel) -> Prompt:
    """Return a prompt, the replies of its messages fed as the model's own ids.

    Replies to which the rule does not apply stay as they were rendered.
    """
    tokens = model.text
    keys = list(_reply_keys(prompt.messages))
    if tokens is None or not keys:
        return prompt
    stored = store.replies(root.key, [key for pair in keys for key in pair])
    packed = [stored.get(key) or stored.get(key_begun) for key, key_begun in keys]
    replies = [_Reply.from_bytes(found) for found in packed if found is not None]
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
        if up_to.digest() != reply.prompt_digest:
            continue
        rendered = tokens.decode(prompt.ids[start:stop])
        own_ids = reply.ids[: _n_rendered(rendered, reply, tokens, model.tokenizer)]
        if not own_ids:
            continue
        copy_up_to(start)
        ids += own_ids
        n_read = stop
        own = tokens.decode(own_ids).encode()
        up_to.update(own)
        before, n_bytes = up_to, reply.n_prompt_bytes + len(own)
    copy_up_to(len(prompt.ids))
    return with_ids(prompt, ids, boundaries)


def _n_rendered(rendered: str, reply: _Reply, tokens: TokenText, tokenizer: Any) -> int:
    """Return how many first ids of a reply a template rendered so; 0 if it rendered others."""

    def n_chars(n_ids: int) -> int:
        return len("".join(_shown(tokens.decode(reply.ids[:n_ids])).split()))

    places: Sequence[int] = range(len(reply.ids) + 1)
    first, stop = len(reply.ids), len(places)
    if not reply.has_ended:
        wanted = len("".join(rendered.split()))
        first, stop = (find(places, wanted, key=n_chars) for find in (bisect_left, bisect_right))
    for n in (*places[first:stop], len(reply.ids)):
        if _is_same(rendered, tokens.decode(reply.ids[:n]), tokenizer):
            return n
    return 0


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


def _reply_keys(messages: Sequence[Mapping[str, Any]]) -> Iterator[tuple[bytes, bytes]]:
    """Yield two keys of each assistant message: hashes over the messages up to it, and before it.

    They do not depend on the form in which a client sends content, nor on reasoning.
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
        before = digest.copy()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
        if message.get("role") == "assistant":
            before.update(b"begun")
            yield digest.digest(), before.digest()


def _call_of(call: Any) -> list[Any]:
    """Return a message's tool call in a form for comparison."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return [call]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            pass
    return [function.get("name"), json.dumps(arguments, sort_keys=True, default=str)]
