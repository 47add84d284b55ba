from __future__ import annotations

from typing import Any

import pytest

from mlx_lm_kvpersist.serve.replies import Conversation, reply_to_remember, restore_replies
from mlx_lm_kvpersist.tiers.store import Turn

from .conftest import Conversations

QUESTION = {"role": "user", "content": "What is it?"}


def with_reply(talk: Conversations, ids: list[int]) -> str:
    """Have `ids` said in reply to the question; return what the client gets."""
    conversation = restore_replies([dict(QUESTION)], talk.root, talk.store, talk.loaded)
    eos = talk.loaded.tokenizer.eos_token_id
    reply = reply_to_remember(conversation, [*ids, eos], talk.loaded)
    if reply is not None:
        talk.store.keep_turn(Turn(talk.root, (), None, (reply,)), [])
        talk.store.drain()
    detokenizer = talk.loaded.tokenizer.detokenizer
    for token_id in ids:
        detokenizer.add_token(token_id)
    detokenizer.finalize()
    return str(detokenizer.text)


def words(talk: Conversations) -> list[int]:
    """Three tokens that begin with a space."""
    assert talk.loaded.text is not None
    pieces = [(i, talk.loaded.text.piece(i)) for i in range(600)]
    return [i for i, piece in pieces if piece.startswith(b" ") and piece[1:].isalpha()][:3]


def sent_back(talk: Conversations, *messages: dict[str, Any]) -> list[dict[str, Any]]:
    copies = [dict(message) for message in messages]
    restore_replies(copies, talk.root, talk.store, talk.loaded)
    return copies


@pytest.mark.parametrize("form", ["string", "parts"])
def test_a_space_that_the_server_dropped_comes_back(talk: Conversations, form: str) -> None:
    assert talk.loaded.text is not None
    ids = words(talk)
    said = talk.loaded.text.decode(ids)
    sent = with_reply(talk, ids)
    assert sent == said[1:]
    content: Any = sent if form == "string" else [{"type": "text", "text": sent}]
    reply = {"role": "assistant", "content": content}
    assert sent_back(talk, QUESTION, reply)[1]["content"] == said


def test_only_in_the_conversation_that_led_to_it(talk: Conversations) -> None:
    assert talk.loaded.text is not None
    ids = words(talk)
    reply = {"role": "assistant", "content": with_reply(talk, ids)}
    other = {"role": "user", "content": "What was it?"}
    assert sent_back(talk, other, reply)[1] == reply
    assert sent_back(talk, reply)[0] == reply
    edited = {"role": "assistant", "content": reply["content"] + "!"}
    assert sent_back(talk, QUESTION, edited)[1] == edited
    as_user = {"role": "user", "content": reply["content"]}
    assert sent_back(talk, QUESTION, as_user)[1] == as_user


def test_a_reply_that_says_what_it_means_is_not_remembered(talk: Conversations) -> None:
    assert talk.loaded.text is not None
    ids = [next(i for i in range(600) if talk.loaded.text.piece(i) == b"a")] * 3
    conversation = Conversation()
    assert reply_to_remember(conversation, ids, talk.loaded) is None
