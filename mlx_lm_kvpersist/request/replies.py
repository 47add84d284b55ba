"""Feed replies that clients send back as the ids that the model produced, if a rule allows it.

The rule: the model reads, byte for byte, the prompt that the template renders from the
conversation. There is one exception. A reply may be fed as the model's own ids, if

1. the client sent back the reply that it got: the same content and reasoning, character by
   character, and equal tool calls, as JSON values. Reasoning may be left out. If the reply has no
   end token, a beginning of the content suffices: the server does not know how much the client has
   read;
2. the prompt's text before the reply is the same, character by character, as when the model
   produced the ids: invalid UTF-8 counts as U+FFFD, as clients see it;
3. the text that the template renders for the reply has the same form as the reply (`_form`), up to
   the end token;
4. the reply's ids include the white space that the template renders at both ends of the reply.

All other text is fed as rendered: the model reads every change that a client makes, even a space or
a line break at the end. The form ignores the differences that the server, the template and the
tokenizer make:

- white space at the ends of content, of reasoning and of tool calls: templates trim it or add it,
  and the server's detokenizer drops a space at either end of a reply;
- white space around control tokens: some tokenizers drop it, such as Phi-3's;
- the spelling of a tool call's JSON: the server parses it, and the template serialises it again;
- Unicode that is not in NFC: some tokenizers normalise it;
- a byte 0, which the server sends as the character U+0100.
"""

from __future__ import annotations

import json
import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from ..apis import text_of
from ..block import Root, pack_ids
from ..host.hooks import Prompt
from ..match import common_prefix
from ..store.block_store import BlockStore
from ..store.records import Commit
from ..store.small_state import REPLY_DIGEST_BYTES
from .model import LoadedModel

Message = Mapping[str, Any]
_CONTROL, _BLANK = "\ud800", "\ud801"
"""Lone surrogates, which no valid text has. In a form, _CONTROL marks control tokens, and _BLANK
marks control tokens that are white space, such as Gemma's line breaks."""


@dataclass(frozen=True)
class _Reply:
    """A reply's ids, the text sent to its client, and the size and digest of its prompt's text.

    has_ended: whether it has an end token. is_known: whether the sent text is known.
    """

    ids: list[int]
    has_ended: bool
    n_prompt_bytes: int
    prompt_digest: str
    is_known: bool
    content: str
    reasoning: str

    @classmethod
    def read(cls, packed: bytes) -> _Reply | None:
        """Unpack a reply; return None if it is malformed: another server may have written it."""
        with suppress(ValueError, TypeError, OverflowError, RecursionError):
            reply = cls(**json.loads(packed))
            kinds = [type(value) for value in vars(reply).values()]
            if kinds == [list, bool, int, str, bool, str, str]:
                pack_ids(reply.ids)
                return reply
        return None

    def was_sent_as(self, message: Message, *, is_whole: bool) -> bool:
        """Whether a client's message is the reply or, unless `is_whole`, the reply's beginning.

        If `is_whole`, only reasoning is compared: the key has proved that the rest is equal.
        """
        thoughts = (message.get(name) for name in ("reasoning", "reasoning_content", "thinking"))
        if any(thought and thought != self.reasoning for thought in thoughts):
            return False
        content, calls = _said(message)
        begins = isinstance(content, str) and bool(content) and self.content.startswith(content)
        return is_whole or (begins and not calls)


def remember(
    messages: Sequence[Message],
    prompt: Sequence[int],
    reply: Sequence[int],
    sent: Message | None,
    root: Root,
    store: BlockStore,
    model: LoadedModel,
    digest: tuple[int, str] | None = None,
) -> Collection[bytes]:
    """Store a reply's ids, and return the keys under which they are stored. Any thread.

    Nothing is stored if a later prompt's match by text finds the same ids anyway.

    O(reply), and a hash over the messages; O(prompt) if the prompt's `digest` is missing.

    `sent` has the content, reasoning and tool calls that the client got; None if they are not known
    yet. A reply without an end token is also found by the messages before it: the client may have
    read only a part.
    """
    if model.text is None or not reply or not messages:
        return ()
    has_ended = reply[-1] in model.tokenizer.eos_token_ids
    if has_ended and sent is None:
        return ()  # a complete reply is found only by the sent text
    if not model.text.covers(reply if digest else (*prompt, *reply)):
        return ()
    ids = list(reply[:-1] if has_ended else reply)
    message: Message = {"role": "assistant", **(sent or {})}
    content, reasoning = message.get("content") or "", message.get("reasoning") or ""
    if has_ended:
        text = model.text.decode(ids)
        if text == content == text.strip() and unicodedata.is_normalized("NFC", text):
            return ()
    *_, (_, key, key_begun) = _replies_among([*messages, message])
    keys = [key] if sent is not None else []
    keys += [] if has_ended else [key_begun]
    digest = digest or digest_of(model.text.decode(prompt))
    packed = _Reply(ids, has_ended, *digest, sent is not None, content, reasoning)
    replies = dict.fromkeys(keys, json.dumps(vars(packed)).encode())
    store.commit(Commit(root, (), replies=replies, messages=messages), [])
    return keys


def digest_of(text: str) -> tuple[int, str]:
    """Return the size in bytes and the digest of a prompt's text, to store with a reply."""
    encoded = text.encode()
    return len(encoded), blake2b(encoded, digest_size=REPLY_DIGEST_BYTES).hexdigest()


def known_replies(store: BlockStore, root: Root, messages: Sequence[Message]) -> dict[bytes, bytes]:
    """Return the packed replies that are remembered for messages, by key. Any thread."""
    return store.replies(root.key, [key for _, *keys in _replies_among(messages) for key in keys])


def retokenize(prompt: Prompt, root: Root, store: BlockStore, model: LoadedModel) -> Prompt:
    """Return a prompt in which replies have the model's own ids, if the module's rule allows."""
    tokens = model.text
    among = list(_replies_among(prompt.messages))
    if tokens is None or not among:
        return prompt
    stored = store.replies(root.key, [key for _, *keys in among for key in keys])
    replies: list[tuple[Message, _Reply]] = []
    for message, key, key_begun in among:
        if (packed := stored.get(key) or stored.get(key_begun)) is not None:
            if (reply := _Reply.read(packed)) is None:
                continue
            reply = reply if reply.is_known else _streamed(reply, model.tokenizer)
            if reply.was_sent_as(message, is_whole=key in stored):
                replies.append((message, reply))
    if not replies or not tokens.covers(prompt.ids):
        return prompt
    read = memoryview(tokens.to_bytes(prompt.ids))
    ends = [0, *tokens.n_bytes_ends(prompt.ids)]
    turn_ends = [i for i, n in enumerate(prompt.ids) if n in model.tokenizer.eos_token_ids]
    turn_ends.append(len(prompt.ids))
    before = blake2b(digest_size=REPLY_DIGEST_BYTES)
    n_bytes = 0  # the number of bytes that `before` has hashed
    ids: list[int] = []
    n_read = 0  # the number of prompt tokens that `ids` already replaces
    for message, reply in replies:
        start = bisect_left(ends, ends[n_read] + reply.n_prompt_bytes - n_bytes, n_read)
        if start >= len(ends):
            continue
        stop = turn_ends[bisect_left(turn_ends, start)]
        up_to = before.copy()
        up_to.update(read[ends[n_read] : ends[start]])
        if up_to.hexdigest() != reply.prompt_digest:
            continue
        own_ids = reply.ids[: _n_rendered(prompt.ids[start:stop], message, reply, model)]
        if not own_ids:
            continue
        ids += [*prompt.ids[n_read:start], *own_ids]
        n_read = stop
        own = tokens.decode(own_ids).encode()
        up_to.update(own)
        before, n_bytes = up_to, reply.n_prompt_bytes + len(own)
    return with_ids(prompt, [*ids, *prompt.ids[n_read:]])


def with_ids(prompt: Prompt, ids: Sequence[int]) -> Prompt:
    """Return the prompt with other ids.

    A segment that ends among changed ids is merged with the next segment.
    """
    old, new = prompt.ids, tuple(ids)
    n_first, n_last = common_prefix(old, new, 0), common_prefix(old[::-1], new[::-1], 0)
    segments, types = [], []
    start = end = 0
    for segment, segment_type in zip(prompt.segments, prompt.segment_types, strict=True):
        end += len(segment)
        is_after = len(old) - end <= n_last
        stop = end + len(new) - len(old) if is_after else end
        if stop > start and (is_after or end <= n_first):
            segments.append(new[start:stop])
            types.append(segment_type)
            start = stop
    return replace(prompt, ids=ids, segments=segments, segment_types=types)


def _n_rendered(
    rendered: Sequence[int], message: Message, reply: _Reply, model: LoadedModel
) -> int:
    """Return how many of a reply's first ids can replace `rendered`; 0 if the forms differ."""
    tokens, n_ids = model.text, len(reply.ids)
    assert tokens is not None
    text = tokens.decode(rendered)
    lead, tail = _blank_ends(text)
    content, calls = _said(message)
    if not (reply.has_ended or calls):  # the ids that the client may have read
        sent = _shown(tokens.decode(reply.ids)).rfind(_shown(reply.content))
        end, places = sent + len(content.rstrip()) + len(tail), range(n_ids + 1)
        n_ids = bisect_right(places, end, key=lambda n: len(tokens.decode(reply.ids[:n]))) - 1
    own_ids = reply.ids[: max(0, n_ids)]
    own = tokens.decode(own_ids)
    own_lead, own_tail = _blank_ends(own)
    if own == text:
        is_same = tokens.controls(own_ids) == tokens.controls(rendered)
    else:
        has_ends = own_lead.endswith(lead) and own_tail.startswith(tail)
        is_same = has_ends and _form(rendered, model) == _form(own_ids, model)
    return len(own_ids) if is_same else 0


def _form(ids: Sequence[int], model: LoadedModel) -> list[str]:
    """Return the form of a reply: texts, cut at control tokens and the marks around tool calls."""
    tokens, tokenizer = model.text, model.tokenizer
    assert tokens is not None
    around = (tokenizer.tool_call_start, tokenizer.tool_call_end)
    calls = re.compile(f"({'|'.join(map(re.escape, filter(None, around))) or '(?!)'})")
    texts, start = [""], 0
    for place in (*tokens.control_places(ids), len(ids)):
        first, *more = calls.split(_shown(tokens.decode(ids[start:place])))
        texts[-1] += first
        texts += more
        control, start = tokens.decode(ids[place : place + 1]), place + 1
        if control.isspace():
            texts[-1] += f"{_BLANK}{control}{_BLANK}"
        else:
            texts += [_CONTROL + control, ""]
    for i, text in enumerate(texts):
        while text != (inner := text.strip().strip(_BLANK)):
            text = inner
        texts[i] = unicodedata.normalize("NFC", text)
        if i and texts[i - 1].strip(_CONTROL) == around[0]:
            with suppress(Exception):  # a call that the server's parser cannot read stays text
                call = tokenizer.tool_parser(text.replace(_BLANK, ""), None)
                texts[i] = json.dumps(call, sort_keys=True, default=str)
    return texts


def _shown(text: str) -> str:
    """Return text as clients see it: mlx-lm shows a byte 0 as the character U+0100."""
    return text.replace("\0", "\u0100")


def _blank_ends(text: str) -> tuple[str, str]:
    return text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]


def _streamed(reply: _Reply, tokenizer: Any) -> _Reply:
    """Return an interrupted reply with the text that its client may have received."""
    detokenizer, end = tokenizer.detokenizer, tokenizer.think_end
    for token_id in reply.ids:
        detokenizer.add_token(token_id)
    detokenizer.finalize()
    reasoning, _, content = detokenizer.text.rpartition(end or _CONTROL)
    reasoning = reasoning.removeprefix(tokenizer.think_start or "")
    return replace(reply, content=content, reasoning=reasoning)


def _replies_among(messages: Sequence[Message]) -> Iterator[tuple[Message, bytes, bytes]]:
    """Yield each assistant message with two keys.

    The first key hashes the messages up to this message, the second key only the messages before
    it. Reasoning, and whether content is a string or a list, do not change the keys.
    """
    digest = blake2b(digest_size=REPLY_DIGEST_BYTES, person=b"kvpersist-talk-3")
    for message in messages:
        encoded = json.dumps([message.get("role"), *_said(message)], default=str).encode()
        before = digest.copy()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
        if message.get("role") == "assistant":
            before.update(b"begun")
            yield message, digest.digest(), before.digest()


def _said(message: Message) -> tuple[Any, list[Any]]:
    """Return a message's content and its tool calls, in forms that can be compared."""
    content = text_of(message.get("content"))
    return content, [_call_of(call) for call in message.get("tool_calls") or ()]


def _call_of(call: Any) -> list[Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return [call]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return [function.get("name"), json.dumps(arguments, sort_keys=True, default=str)]
