"""The model reads what the client sent: any edit of a reply, however small, is read."""

from __future__ import annotations

import copy
import json
import random
import unicodedata
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from mlx_lm_kvpersist.block import Root
from mlx_lm_kvpersist.request.replies import remember
from mlx_lm_kvpersist.store.block_store import BlockStore, StoreLimits
from tests.support.chat import Chat, ChatTurn
from tests.support.pairs import every_pair
from tests.support.wire import Message

from .test_replies import (
    CALL,
    NEXT,
    QUESTION,
    RESULT,
    Template,
    chat_with,
    exactly,
    follow_up,
    is_fed_as_it_was,
    make_tokenizer,
    read,
    read_again,
    thinking,
)

CODE = "def f(x):\n  if x:\n    return 1\n\n  return cafe\u0301 or 'A b'"
EDITS = {
    "indentation": (CODE, CODE.replace("  ", "    ")),
    "tabs": (CODE, CODE.replace("    ", "\t")),
    "no-indentation": (CODE, CODE.replace("\n  ", "\n")),
    "crlf": (CODE, CODE.replace("\n", "\r\n")),
    "lf": (CODE.replace("\n", "\r\n"), CODE),
    "empty-line": (CODE, CODE.replace("\n\n", "\n")),
    "composed": (CODE, unicodedata.normalize("NFC", CODE)),
    "decomposed": ("caf\u00e9 \u00c5 on", "cafe\u0301 A\u030a on"),
    "compatibility": ("\u2163 \ufb01n \u210c", "IV fin H"),
    "zero-width": (CODE, CODE.replace("return", "re\u200bturn")),
    "no-zero-width": ("a\u200db \u2060c\ufeff d", "ab c d"),
    "byte-order-mark": (CODE, "\ufeff" + CODE),
    "no-break-space": (CODE, CODE.replace("A b", "A\u00a0b")),
    "case": (CODE, CODE.replace("return", "Return")),
    "soft-hyphen": (CODE, CODE.replace("return", "re\u00adturn")),
    "line-separator": (CODE, CODE.replace("\n\n", "\u2028")),
    "space-before": (CODE, " " + CODE),
    "line-break-before": (CODE, "\n" + CODE),
    "no-line-break-before": ("\n" + CODE, CODE),
    "line-break-behind": (CODE, CODE + "\n"),
    "no-line-break-behind": (CODE + "\n\n", CODE + "\n"),
    "no-white-space-behind": (CODE + " \n", CODE),
    "space-behind": (CODE, CODE + " "),
    "a-character-less": (CODE, CODE[1:]),
    "replacement": ("a\ufffdb c", "ab c"),
    "byte-0": ("a\0b c", "ab c"),
}
KINDS = ("byte-level", "byte-level-nfc", "metaspace-first", "sentencepiece-legacy")
ENDS = ("stop", "length", "left")


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {kind: make_tokenizer(kind, tmp_path_factory.mktemp(kind)) for kind in KINDS}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlockStore]:
    store = BlockStore(tmp_path_factory.mktemp("edits") / "store", StoreLimits(1 << 30, 1 << 30))
    yield store
    store.close()


def first_turn(chat: Chat, text: str, end: str, monkeypatch: pytest.MonkeyPatch) -> ChatTurn:
    """Have the model say a text: to its end, or cut by max_tokens, or by its client that left."""
    return said_until(chat, [QUESTION], exactly(chat, text), end, monkeypatch)


def said_until(
    chat: Chat, talk: list[Message], ids: list[int], end: str, monkeypatch: pytest.MonkeyPatch
) -> ChatTurn:
    if end == "stop":
        return chat.turn(talk, [*ids, chat.tokenizer.eos_token_id])
    with monkeypatch.context() as leaving:
        if end == "left":

            def unknown(messages: Any, prompt: Any, reply: Any, sent: Any, *rest: Any) -> Any:
                return remember(messages, prompt, reply, None, *rest)

            leaving.setattr("tests.support.chat.remember", unknown)
        return chat.turn(talk, ids, finish_reason="length")


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_edit_of_a_reply_is_read_as_edited(
    tokenizers: dict[str, Any],
    store: BlockStore,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    end: str,
) -> None:
    for edit, trim in product(EDITS, ("", "| trim")):
        said, edited = EDITS[edit]
        chat = chat_with(tokenizers[kind], store, Template(trim=trim))
        first = first_turn(chat, said, end, monkeypatch)
        assert first.message["content"] != edited, edit
        after = follow_up(chat, first, content=edited)
        texts = [read(chat, ids) for ids in (after.fed, after.rendered)]
        if kind == "byte-level-nfc":  # this tokenizer normalises the text
            texts = [unicodedata.normalize("NFC", text) for text in texts]
        assert texts[0] == texts[1], (edit, trim)
        if not trim and kind == "byte-level":
            assert f"assistant\n{edited}<|im_end|>" in read(chat, after.fed), edit


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_reply_that_nobody_edits_is_fed_as_it_was(
    tokenizers: dict[str, Any],
    store: BlockStore,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    end: str,
) -> None:
    """However it ended, and also if it begins and ends with white space."""
    for said in (CODE, " " + CODE, "\n" + CODE, CODE.replace("\n", "\r\n")):
        for trim in ("", "| trim"):
            chat = chat_with(tokenizers[kind], store, Template(trim=trim))
            first = first_turn(chat, said, end, monkeypatch)
            after = follow_up(chat, first)
            own = [*first.fed, *exactly(chat, said)]
            assert after.fed[: len(own)] == own and after.n_reused >= len(own)


@pytest.mark.parametrize("end", ENDS)
def test_white_space_that_a_client_strips_from_an_end_is_not_read(
    tokenizers: dict[str, Any], store: BlockStore, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Also if a token has both white space and text that the client kept."""
    chat = chat_with(tokenizers["byte-level"], store, Template())
    first = first_turn(chat, "yes \n\n", end, monkeypatch)
    after = follow_up(chat, first, content="yes")
    assert "assistant\nyes<|im_end|>" in read(chat, after.fed)
    for keeps in ("yes ", "yes \n"):
        assert f"assistant\n{keeps}<|im_end|>" in read(
            chat, follow_up(chat, first, content=keeps).fed
        )


def test_a_stop_string_that_shares_a_token_with_the_reply_is_not_read(
    tokenizers: dict[str, Any], store: BlockStore
) -> None:
    chat = chat_with(tokenizers["byte-level"], store, Template())
    together = [*exactly(chat, "so"), *chat.encode("\n\n")]
    first = chat.turn([QUESTION], together, stop_words=["\n\n"], finish_reason="length")
    sent = {**first.message, "content": first.message["content"].partition("\n\n")[0]}
    after = chat.turn([QUESTION, sent, NEXT], [chat.tokenizer.eos_token_id])
    assert read(chat, after.fed) == read(chat, after.rendered)
    edited = chat.turn([QUESTION, {**sent, "content": "so\n"}, NEXT], [0])
    assert read(chat, edited.fed) == read(chat, edited.rendered)


REASONING = {
    "indentation": lambda text: text.replace("  ", "    "),
    "line-break": lambda text: text + "\n",
    "no-line-break": lambda text: text.strip("\n"),
    "inner-line-break": lambda text: text.replace(" is", "\nis"),
    "composed": lambda text: unicodedata.normalize("NFC", text),
    "zero-width": lambda text: text.replace("is", "i\u200bs"),
    "case": str.upper,
}


@every_pair(
    name=["reasoning", "reasoning_content"], edit=list(REASONING), finish_reason=["stop", "length"]
)
def test_an_edit_of_reasoning_is_read_as_edited(
    tokenizers: dict[str, Any], store: BlockStore, name: str, edit: str, finish_reason: str
) -> None:
    template = thinking(kept=True).replace("m.reasoning", f"m.{name}")
    for strips in (True, False):
        source = (
            template if strips else template.replace(".strip('\\n') + '\\n</think>", " + '</think>")
        )
        chat = chat_with(tokenizers["byte-level"], store, source)
        ids = exactly(chat, "<think>\nWhere  is cafe\u0301?\n</think>\n\nThere.")
        ids += [chat.tokenizer.eos_token_id] if finish_reason == "stop" else []
        first = chat.turn([QUESTION], ids, finish_reason=finish_reason)
        thought = first.message.pop("reasoning")
        same = follow_up(chat, first, **{name: thought})
        assert same.fed[: len(first.fed) + 20] == [*first.fed, *ids][: len(first.fed) + 20]
        after = follow_up(chat, first, **{name: REASONING[edit](thought)})
        assert read(chat, after.fed) == read(chat, after.rendered)


ARGUMENTS = [
    {"b": 1, "a": [2], "code": "if x:\n  y"},
    {"b": 1.5, "a": [2], "code": "if x:\n    y"},
    {"b": 1, "a": [2], "code": "if x:\r\n    y"},
    {"b": 1, "a": [2], "code": "if x:\n    y\n"},
    {"b": 1, "a": [2], "code": "if x:\n    Y"},
    {"b": 1, "a": [2.0], "code": "if x:\n    y"},
    {"b": "1", "a": [2], "code": "if x:\n    y"},
    {"b": True, "a": [2], "code": "if x:\n    y"},
    {"b": 1, "a": 2, "code": "if x:\n    y"},
    {"b": 1, "a": [2], "code": "if x:\n    y", "c": None},
]
SAID = {"b": 1, "a": [2], "code": "if x:\n    y"}


@pytest.mark.parametrize("finish_reason", ["stop", "length"])
@pytest.mark.parametrize("n", range(len(ARGUMENTS)))
def test_an_edit_of_a_calls_arguments_is_read_as_edited(
    tokenizers: dict[str, Any], store: BlockStore, n: int, finish_reason: str
) -> None:
    chat = chat_with(tokenizers["byte-level"], store, thinking())
    said = CALL.replace('{"b":1, "a": [2 ]}', json.dumps(SAID))
    assert said != CALL
    ids = exactly(chat, f"Let me.\n{said}")
    ids += [chat.tokenizer.eos_token_id] if finish_reason == "stop" else []
    first = chat.turn([QUESTION], ids, finish_reason=finish_reason)
    end = [chat.tokenizer.eos_token_id]
    again = copy.deepcopy(first.message)
    again["tool_calls"][0]["function"]["arguments"] = json.dumps(SAID, indent=2, sort_keys=True)
    assert is_fed_as_it_was(first, chat.turn([QUESTION, again, RESULT], end)) or (
        finish_reason == "length"
    )
    edited = copy.deepcopy(first.message)
    edited["tool_calls"][0]["function"]["arguments"] = json.dumps(ARGUMENTS[n])
    after = chat.turn([QUESTION, edited, RESULT], end)
    assert read(chat, after.fed) == read(chat, after.rendered)
    renamed = copy.deepcopy(first.message)
    renamed["tool_calls"][0]["function"]["name"] = "Look"
    after = chat.turn([QUESTION, renamed, RESULT], end)
    assert read(chat, after.fed) == read(chat, after.rendered)


def test_a_template_that_rewrites_white_space_inside_a_reply_is_heeded(
    tokenizers: dict[str, Any], store: BlockStore
) -> None:
    chat = chat_with(tokenizers["byte-level"], store, Template(trim=".replace('\\n\\n', '\\n')"))
    for end in ([chat.tokenizer.eos_token_id], []):
        ids = [*exactly(chat, " one\n\ntwo"), *end]
        first = chat.turn([QUESTION], ids, finish_reason="stop" if end else "length")
        after = follow_up(chat, first)
        assert read(chat, after.fed) == read(chat, after.rendered)


@pytest.mark.parametrize("end", ENDS)
def test_edits_are_read_after_a_restart_too(
    tokenizers: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    def chat_on(store: BlockStore) -> Chat:
        chat = chat_with(tokenizers["byte-level"], store, Template(trim="| trim"))
        chat.root = Root("edited", "none")
        return chat

    limits = StoreLimits(1 << 30, 1 << 30)
    store = BlockStore(tmp_path, limits)
    chat = chat_on(store)
    first = first_turn(chat, " " + CODE, end, monkeypatch)
    store.drain()
    store.close()
    store = BlockStore(tmp_path, limits)
    try:
        chat = chat_on(store)
        message: Message = first.message
        own = [*first.fed, *exactly(chat, " " + CODE)]
        end_token = [chat.tokenizer.eos_token_id]
        assert chat.turn([QUESTION, message, NEXT], end_token).fed[: len(own)] == own
        edited = {**message, "content": message["content"].replace("  ", "    ")}
        after = chat.turn([QUESTION, edited, NEXT], end_token)
        assert read(chat, after.fed) == read(chat, after.rendered)
    finally:
        store.close()


PIECES = [
    *(" ", "  ", "\n", "\n\n", "\t", "\r\n", "a", "B", "x = 1", "\u00e9", "e\u0301", "\u00c5"),
    *("\u200b", "\ufeff", "\U0001f389", "\u00a0", "\u2028", "\ufffd", "\ufb01", "\u2163", "\u0100"),
    *("\u1100\u1161", "\uac00", "<think>", "</think>", "[INST]", "<tool_call>"),
]
N_EDITED = 40
"""Conversations for each tokenizer."""
FORMS: tuple[Any, ...] = ("NFC", "NFD", "NFKC", "NFKD")


def edited_somewhere(rng: random.Random, text: str) -> str:
    """Return a text with a change of any kind: at an end, in the middle, or all over."""
    at, kind = rng.randrange(len(text) + 1), rng.randrange(6)
    if kind == 0:
        return text[:at] + rng.choice(PIECES) + text[at:]
    if kind == 1:
        return text[:at] + text[at + 1 :]
    if kind == 2:
        return unicodedata.normalize(rng.choice(FORMS), text)
    if kind == 3:
        return text.replace(*rng.choice([("  ", " "), ("\n", "\r\n"), ("\r\n", "\n"), (" ", "")]))
    if kind == 4:
        return rng.choice([str.strip, str.lstrip, str.rstrip])(text)
    return rng.choice([text + rng.choice(PIECES), rng.choice(PIECES) + text, text[:at], text[at:]])


def hold_edited_talk(
    tokenizer: Any, is_nfc: bool, store: BlockStore, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Have some turns, then come back with random replies edited."""
    rng = random.Random(seed)
    lead, tail = rng.choice(["", "\n", " "]), rng.choice(["", "\n", " "])
    ends = rng.choice(["EOS", "EOS\n", "\n"])
    template = Template(lead, rng.choice(["", "| trim"]), tail, ends)
    chat = chat_with(tokenizer, store, template)
    end, talk, replies = tokenizer.eos_token_id, list[Message](), list[tuple[str, str]]()
    for n in range(rng.randint(1, 3)):
        talk.append({"role": "user", "content": f"{n}. {rng.choice(PIECES)}z"})
        ids = []
        for piece in rng.choices(PIECES, k=rng.randint(1, 7)):
            ids += exactly(chat, piece) if rng.random() < 0.5 else chat.encode(piece)
        ending = rng.choice(ENDS)
        talk.append(said_until(chat, talk, ids, ending, monkeypatch).message)
        replies.append((ending, talk[-1].get("content") or ""))

    def shown(text: str) -> str:
        return unicodedata.normalize("NFC", text) if is_nfc else text

    for _ in range(3):
        again, edits = copy.deepcopy(talk), list[str]()
        for message, (ending, said) in zip(again[1::2], replies, strict=True):
            if said and rng.random() < 0.6:
                message["content"] = content = edited_somewhere(rng, said)
                if not (ending != "stop" and said.startswith(content)) and content != said:
                    edits.append(content)
        after = chat.turn([*again, NEXT], [end])
        fed, rendered = (shown(read(chat, ids)) for ids in (after.fed, after.rendered))
        own, its = (chat.tokens.controls(ids) for ids in (after.fed, after.rendered))
        assert [i for _, i in own] == [i for _, i in its], seed
        for text in edits:
            written = shown(read_again(chat, template.of_reply(text)))
            assert fed.count(written) >= rendered.count(written), (seed, text)
        if len(edits) == len(replies):
            assert fed == rendered, seed


@pytest.mark.parametrize("kind", KINDS)
def test_random_edits_of_some_replies_are_read_as_edited(
    tokenizers: dict[str, Any], store: BlockStore, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other replies stay unedited; for any template, however each reply ended."""
    for seed in range(N_EDITED):
        hold_edited_talk(tokenizers[kind], kind == "byte-level-nfc", store, seed, monkeypatch)
