"""If a client edits a reply, even slightly, the model reads the edited text."""

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
    byte_ids,
    chat_with,
    decoded,
    decoded_after_break,
    follow_up,
    make_tokenizer,
    original_ids_are_fed,
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
    "line-break-after": (CODE, CODE + "\n"),
    "no-line-break-after": (CODE + "\n\n", CODE + "\n"),
    "no-white-space-after": (CODE + " \n", CODE),
    "space-after": (CODE, CODE + " "),
    "no-first-character": (CODE, CODE[1:]),
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
    """Have the model reply with a text that ends, is cut by max_tokens, or whose client leaves."""
    return turn_that_ends(chat, [QUESTION], byte_ids(chat, text), end, monkeypatch)


def turn_that_ends(
    chat: Chat, talk: list[Message], ids: list[int], end: str, monkeypatch: pytest.MonkeyPatch
) -> ChatTurn:
    if end == "stop":
        return chat.turn(talk, [*ids, chat.tokenizer.eos_token_id])
    with monkeypatch.context() as leaving:
        if end == "left":

            def remember_unsent(
                messages: Any, prompt: Any, reply: Any, sent: Any, *rest: Any
            ) -> Any:
                return remember(messages, prompt, reply, None, *rest)

            leaving.setattr("tests.support.chat.remember", remember_unsent)
        return chat.turn(talk, ids, finish_reason="length")


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_model_reads_an_edited_reply_as_edited(
    tokenizers: dict[str, Any],
    store: BlockStore,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    end: str,
) -> None:
    for edit, trim in product(EDITS, ("", "| trim")):
        reply_text, edited = EDITS[edit]
        chat = chat_with(tokenizers[kind], store, Template(trim=trim))
        first = first_turn(chat, reply_text, end, monkeypatch)
        assert first.message["content"] != edited, edit
        after = follow_up(chat, first, content=edited)
        texts = [decoded(chat, ids) for ids in (after.fed, after.rendered)]
        if kind == "byte-level-nfc":  # this tokenizer normalises the text
            texts = [unicodedata.normalize("NFC", text) for text in texts]
        assert texts[0] == texts[1], (edit, trim)
        if not trim and kind == "byte-level":
            assert f"assistant\n{edited}<|im_end|>" in decoded(chat, after.fed), edit


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_the_model_reads_an_unedited_reply_by_its_original_ids(
    tokenizers: dict[str, Any],
    store: BlockStore,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    end: str,
) -> None:
    """This also holds for interrupted replies and for leading white space."""
    for reply_text in (CODE, " " + CODE, "\n" + CODE, CODE.replace("\n", "\r\n")):
        for trim in ("", "| trim"):
            chat = chat_with(tokenizers[kind], store, Template(trim=trim))
            first = first_turn(chat, reply_text, end, monkeypatch)
            after = follow_up(chat, first)
            own = [*first.fed, *byte_ids(chat, reply_text)]
            assert after.fed[: len(own)] == own and after.n_reused >= len(own)


@pytest.mark.parametrize("end", ENDS)
def test_trailing_white_space_that_a_client_strips_is_not_read(
    tokenizers: dict[str, Any], store: BlockStore, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Also if a token has both white space and text that the client kept."""
    chat = chat_with(tokenizers["byte-level"], store, Template())
    first = first_turn(chat, "yes \n\n", end, monkeypatch)
    after = follow_up(chat, first, content="yes")
    assert "assistant\nyes<|im_end|>" in decoded(chat, after.fed)
    for keeps in ("yes ", "yes \n"):
        assert f"assistant\n{keeps}<|im_end|>" in decoded(
            chat, follow_up(chat, first, content=keeps).fed
        )


def test_a_stop_string_that_shares_a_token_with_the_reply_is_not_read(
    tokenizers: dict[str, Any], store: BlockStore
) -> None:
    chat = chat_with(tokenizers["byte-level"], store, Template())
    together = [*byte_ids(chat, "so"), *chat.encode("\n\n")]
    first = chat.turn([QUESTION], together, stop_words=["\n\n"], finish_reason="length")
    sent = {**first.message, "content": first.message["content"].partition("\n\n")[0]}
    after = chat.turn([QUESTION, sent, NEXT], [chat.tokenizer.eos_token_id])
    assert decoded(chat, after.fed) == decoded(chat, after.rendered)
    edited = chat.turn([QUESTION, {**sent, "content": "so\n"}, NEXT], [0])
    assert decoded(chat, edited.fed) == decoded(chat, edited.rendered)


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
def test_the_model_reads_edited_reasoning_as_edited(
    tokenizers: dict[str, Any], store: BlockStore, name: str, edit: str, finish_reason: str
) -> None:
    template = thinking(kept=True).replace("m.reasoning", f"m.{name}")
    for strips in (True, False):
        source = (
            template if strips else template.replace(".strip('\\n') + '\\n</think>", " + '</think>")
        )
        chat = chat_with(tokenizers["byte-level"], store, source)
        ids = byte_ids(chat, "<think>\nWhere  is cafe\u0301?\n</think>\n\nThere.")
        ids += [chat.tokenizer.eos_token_id] if finish_reason == "stop" else []
        first = chat.turn([QUESTION], ids, finish_reason=finish_reason)
        thought = first.message.pop("reasoning")
        same = follow_up(chat, first, **{name: thought})
        assert same.fed[: len(first.fed) + 20] == [*first.fed, *ids][: len(first.fed) + 20]
        after = follow_up(chat, first, **{name: REASONING[edit](thought)})
        assert decoded(chat, after.fed) == decoded(chat, after.rendered)


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
@pytest.mark.parametrize("index", range(len(ARGUMENTS)))
def test_the_model_reads_edited_tool_calls_as_edited(
    tokenizers: dict[str, Any], store: BlockStore, index: int, finish_reason: str
) -> None:
    chat = chat_with(tokenizers["byte-level"], store, thinking())
    reply_text = CALL.replace('{"b":1, "a": [2 ]}', json.dumps(SAID))
    assert reply_text != CALL
    ids = byte_ids(chat, f"Let me.\n{reply_text}")
    ids += [chat.tokenizer.eos_token_id] if finish_reason == "stop" else []
    first = chat.turn([QUESTION], ids, finish_reason=finish_reason)
    end = [chat.tokenizer.eos_token_id]
    again = copy.deepcopy(first.message)
    again["tool_calls"][0]["function"]["arguments"] = json.dumps(SAID, indent=2, sort_keys=True)
    assert original_ids_are_fed(first, chat.turn([QUESTION, again, RESULT], end))
    edited = copy.deepcopy(first.message)
    edited["tool_calls"][0]["function"]["arguments"] = json.dumps(ARGUMENTS[index])
    after = chat.turn([QUESTION, edited, RESULT], end)
    assert decoded(chat, after.fed) == decoded(chat, after.rendered)
    renamed = copy.deepcopy(first.message)
    renamed["tool_calls"][0]["function"]["name"] = "Look"
    after = chat.turn([QUESTION, renamed, RESULT], end)
    assert decoded(chat, after.fed) == decoded(chat, after.rendered)


def test_white_space_that_a_template_rewrites_is_read_as_rendered(
    tokenizers: dict[str, Any], store: BlockStore
) -> None:
    chat = chat_with(tokenizers["byte-level"], store, Template(trim=".replace('\\n\\n', '\\n')"))
    for end in ([chat.tokenizer.eos_token_id], []):
        ids = [*byte_ids(chat, " one\n\ntwo"), *end]
        first = chat.turn([QUESTION], ids, finish_reason="stop" if end else "length")
        after = follow_up(chat, first)
        assert decoded(chat, after.fed) == decoded(chat, after.rendered)


@pytest.mark.parametrize("end", ENDS)
def test_the_model_reads_edits_after_a_restart(
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
        own = [*first.fed, *byte_ids(chat, " " + CODE)]
        end_token = [chat.tokenizer.eos_token_id]
        assert chat.turn([QUESTION, message, NEXT], end_token).fed[: len(own)] == own
        edited = {**message, "content": message["content"].replace("  ", "    ")}
        after = chat.turn([QUESTION, edited, NEXT], end_token)
        assert decoded(chat, after.fed) == decoded(chat, after.rendered)
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


def check_random_edits(
    tokenizer: Any, is_nfc: bool, store: BlockStore, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Have some turns, then send the conversation back with random replies edited."""
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
            ids += byte_ids(chat, piece) if rng.random() < 0.5 else chat.encode(piece)
        ending = rng.choice(ENDS)
        talk.append(turn_that_ends(chat, talk, ids, ending, monkeypatch).message)
        replies.append((ending, talk[-1].get("content") or ""))

    def shown(text: str) -> str:
        return unicodedata.normalize("NFC", text) if is_nfc else text

    for _ in range(3):
        again, edits = copy.deepcopy(talk), list[str]()
        for message, (ending, reply_text) in zip(again[1::2], replies, strict=True):
            if reply_text and rng.random() < 0.6:
                message["content"] = content = edited_somewhere(rng, reply_text)
                if (
                    not (ending != "stop" and reply_text.startswith(content))
                    and content != reply_text
                ):
                    edits.append(content)
        after = chat.turn([*again, NEXT], [end])
        fed, rendered = (shown(decoded(chat, ids)) for ids in (after.fed, after.rendered))
        fed_controls, rendered_controls = (
            chat.tokens.controls(ids) for ids in (after.fed, after.rendered)
        )
        assert [i for _, i in fed_controls] == [i for _, i in rendered_controls], seed
        for text in edits:
            written = shown(decoded_after_break(chat, template.of_reply(text)))
            assert fed.count(written) >= rendered.count(written), (seed, text)
        if len(edits) == len(replies):
            assert fed == rendered, seed


@pytest.mark.parametrize("kind", KINDS)
def test_the_model_reads_randomly_edited_replies_as_edited(
    tokenizers: dict[str, Any], store: BlockStore, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other replies stay unedited. The template and the ends of replies are random, too."""
    for seed in range(N_EDITED):
        check_random_edits(tokenizers[kind], kind == "byte-level-nfc", store, seed, monkeypatch)
