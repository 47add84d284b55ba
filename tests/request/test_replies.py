from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from mlx_lm_kvpersist.host.prompt import Prompt
from mlx_lm_kvpersist.request.insert import remember_reply
from mlx_lm_kvpersist.request.replies import (
    KnownReply,
    read_conversation,
    reply_to_remember,
    respell,
)
from mlx_lm_kvpersist.request.segments import with_text
from mlx_lm_kvpersist.request.state import RequestState

from .conftest import Conversations

Message = dict[str, Any]
QUESTION: Message = {"role": "user", "content": "What is it?"}
NEXT: Message = {"role": "user", "content": "And then?"}


def words(talk: Conversations) -> list[int]:
    """Three tokens that begin with a space."""
    assert talk.loaded.text is not None
    pieces = [(i, talk.loaded.text.piece(i)) for i in range(600)]
    return [i for i, piece in pieces if piece.startswith(b" ") and piece[1:].isalpha()][:3]


def streamed(talk: Conversations, ids: list[int]) -> str:
    """Return what the server sends for these ids."""
    detokenizer = talk.loaded.tokenizer.detokenizer
    for token_id in ids:
        detokenizer.add_token(token_id)
    detokenizer.finalize()
    return str(detokenizer.text)


def say(talk: Conversations, ids: list[int], sent: Message, ended: bool = True) -> None:
    """Have `ids` said in reply to the question, and `sent` received."""
    conversation, _ = read_conversation([QUESTION], talk.root, talk.store)
    said = [*ids, talk.loaded.tokenizer.eos_token_id] if ended else ids
    state = RequestState(root=talk.root, conversation=conversation, reply_ids=said, sent=sent)
    remember_reply(state, talk.store, talk.loaded)
    talk.store.drain()


def known(talk: Conversations, *messages: Message) -> list[KnownReply]:
    return read_conversation([*messages], talk.root, talk.store)[1]


def rendered(talk: Conversations, *messages: Message) -> str:
    def render(changed: list[Message]) -> str:
        return str(
            talk.loaded.tokenizer.apply_chat_template(
                copy.deepcopy(changed), tokenize=False, add_generation_prompt=True
            )
        )

    replies = known(talk, *messages)
    text = respell([*messages], replies, render, talk.loaded) if replies else None
    return text or render([*messages])


@pytest.mark.parametrize("form", ["string", "parts"])
def test_a_space_that_the_server_dropped_comes_back(talk: Conversations, form: str) -> None:
    assert talk.loaded.text is not None
    ids = words(talk)
    said, sent = talk.loaded.text.decode(ids), streamed(talk, ids)
    assert sent == said[1:]
    say(talk, ids, {"content": sent})
    content: Any = sent if form == "string" else [{"type": "text", "text": sent}]
    reply = {"role": "assistant", "content": content}
    assert known(talk, QUESTION, reply, NEXT) == [KnownReply(1, ids)]
    reply["content"] = sent
    plain = rendered(talk, QUESTION, {**reply, "content": sent + "!"}, NEXT).replace("!", "", 1)
    assert rendered(talk, QUESTION, reply, NEXT) == plain.replace(sent, said, 1)


def test_only_in_the_conversation_that_led_to_it(talk: Conversations) -> None:
    ids = words(talk)
    say(talk, ids, {"content": streamed(talk, ids)})
    reply = {"role": "assistant", "content": streamed(talk, ids)}
    assert known(talk, QUESTION, reply)
    assert not known(talk, {**QUESTION, "content": "What was it?"}, reply)
    assert not known(talk, {**QUESTION, "role": "system"}, reply)
    assert not known(talk, reply)
    assert not known(talk, QUESTION, {**reply, "content": reply["content"] + " "})
    assert not known(talk, QUESTION, {**reply, "role": "user"})
    calls = [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]
    assert not known(talk, QUESTION, {**reply, "tool_calls": calls})


def test_a_tool_call_comes_back_however_it_is_serialised(talk: Conversations) -> None:
    assert talk.loaded.text is not None
    said = '<tool_call>\n{"name": "look",   "arguments": {"b":1, "a": [2 ]}}\n</tool_call>'
    ids = talk.loaded.encode(said)
    said = talk.loaded.text.decode(ids)

    def call(arguments: Any) -> list[Message]:
        return [
            {"id": "1", "type": "function", "function": {"name": "look", "arguments": arguments}}
        ]

    say(talk, ids, {"content": "", "tool_calls": call('{"b": 1, "a": [2]}')})
    result = {"role": "tool", "content": "seen"}
    for arguments in ('{"b":1,"a":[2]}', '{ "a" : [2], "b" : 1 }', {"a": [2], "b": 1}):
        reply = {"role": "assistant", "content": None, "tool_calls": call(arguments)}
        assert known(talk, QUESTION, reply, result) == [KnownReply(1, ids)]
    # The server parses arguments before it renders.
    reply = {"role": "assistant", "content": "", "tool_calls": call({"b": 1, "a": [2]})}
    text = rendered(talk, QUESTION, reply, result)
    assert said in text and "seen" in text
    other = {"role": "assistant", "content": "", "tool_calls": call('{"b": 2, "a": [2]}')}
    assert not known(talk, QUESTION, other, result)


@pytest.mark.parametrize(
    ("sent", "ended"),
    [
        ({"content": "what the ids say"}, True),
        ({"content": "what the"}, True),  # a stop word was cut off
        ({"content": "", "reasoning": "hm"}, True),
        ({"content": "", "tool_calls": [{"function": {"name": "f"}}]}, False),
    ],
)
def test_replies_that_are_not_the_whole_of_their_ids(
    talk: Conversations, sent: Message, ended: bool
) -> None:
    assert talk.loaded.text is not None
    ids = [i for i in talk.loaded.encode("what the ids say") if talk.loaded.text.piece(i) != b" "]
    conversation, _ = read_conversation([QUESTION], talk.root, talk.store)
    if sent["content"].endswith("say"):
        sent = {"content": talk.loaded.text.decode(ids)}
    said = [*ids, talk.loaded.tokenizer.eos_token_id] if ended else ids
    assert reply_to_remember(conversation, said, sent, talk.loaded) is None


def test_a_template_that_trims(talk: Conversations) -> None:
    assert talk.loaded.text is not None
    ids = words(talk)
    say(talk, ids, {"content": streamed(talk, ids)})
    reply = {"role": "assistant", "content": streamed(talk, ids)}

    def render(messages: list[Message]) -> str:
        return "".join(f"<{m['role']}>{m['content'].strip()}</>" for m in messages)

    text = respell([QUESTION, reply, NEXT], known(talk, QUESTION, reply), render, talk.loaded)
    said = talk.loaded.text.decode(ids)
    assert text == f"<user>What is it?</><assistant>{said}</><user>And then?</>"


def test_a_template_that_does_more_than_to_place_a_reply(talk: Conversations) -> None:
    ids = words(talk)
    say(talk, ids, {"content": streamed(talk, ids)})
    reply = {"role": "assistant", "content": streamed(talk, ids)}
    replies = known(talk, QUESTION, reply)

    def counts(messages: list[Message]) -> str:
        return "|".join(f"{len(m['content'])} {m['content']}" for m in messages)

    def drops(messages: list[Message]) -> str:
        return "|".join(m["content"] for m in messages if m["role"] == "user")

    for render in (counts, drops):
        assert respell([QUESTION, reply, NEXT], replies, render, talk.loaded) is None


def test_segments_survive_another_spelling(talk: Conversations) -> None:
    assert talk.loaded.text is not None
    system, reply, question = (talk.loaded.encode(t) for t in ("be good\n", "yes\n", "why\n"))
    ids = system + reply + question
    prompt = Prompt(ids, [system, reply + question[:-1], question[-1:]], ["system", "user", "tail"])
    text = talk.loaded.text.decode(ids)
    other = text.replace("yes", "  yes", 1).removeprefix(" ")
    made = with_text(prompt, other, talk.loaded)
    assert made.segment_types == prompt.segment_types
    assert [token for segment in made.segments for token in segment] == made.ids
    assert made.segments[-1] == prompt.segments[-1]
    assert json.dumps(made.ids) != json.dumps(ids)
