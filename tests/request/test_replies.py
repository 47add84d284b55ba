"""Replies that clients send back: when original ids are fed, and which text is read."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import load as load_tokenizer

from mlx_lm_kvpersist.block import Root
from mlx_lm_kvpersist.host.hooks import Prompt
from mlx_lm_kvpersist.request.replies import known_replies, retokenize
from mlx_lm_kvpersist.request.serving import RequestState, Serving
from mlx_lm_kvpersist.store.block_store import BlockStore, Commit, StoreLimits
from mlx_lm_kvpersist.store.records import Leaf
from mlx_lm_kvpersist.store.stored_sessions import StoredSessions
from tests.store.conftest import arrays_of, chain
from tests.support import n_not_sent, serves_holes
from tests.support.chat import Chat, ChatTurn
from tests.support.pairs import every_pair
from tests.support.synthetic import train_tokenizer
from tests.support.wire import Message

KINDS = [
    "byte-level",
    "byte-level-nfc",
    "metaspace-first",
    "metaspace-always",
    "metaspace-never",
    "sentencepiece-legacy",
]
if serves_holes():
    KINDS.append("byte-level-holes")
EXTRA = ("<|im_start|>", "<think>", "</think>", "<tool_call>", "</tool_call>", "[INST]")
QUESTION: Message = {"role": "user", "content": "What is it?"}
NEXT: Message = {"role": "user", "content": "And then?"}
_names = count()


def make_tokenizer(kind: str, folder: Path) -> Any:
    is_byte_level = kind.startswith("byte-level")
    name: Any = {"byte-level": "byte-level", "sentencepiece": kind}.get(kind.rpartition("-")[0])
    name = "byte-level" if is_byte_level else name or "sentencepiece"
    extra = EXTRA[1:] if is_byte_level else EXTRA
    files = train_tokenizer(name, 600, bos=False, extra_special_tokens=extra)
    files.save(folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    if kind == "byte-level-nfc":
        content["normalizer"] = {"type": "NFC"}
    if kind == "byte-level-holes":
        for added in content["added_tokens"]:
            added["id"] += 8000
            content["model"]["vocab"][added["content"]] = added["id"]
    if kind.startswith("metaspace"):
        content["pre_tokenizer"]["prepend_scheme"] = kind.removeprefix("metaspace-")
    path.write_text(json.dumps(content))
    # The text from which mlx-lm infers the form of tool calls.
    return load_tokenizer(folder, {"tool_parser_type": "json_tools"})


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return {kind: make_tokenizer(kind, tmp_path_factory.mktemp(kind)) for kind in KINDS}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BlockStore]:
    store = BlockStore(tmp_path_factory.mktemp("replies") / "store", StoreLimits(1 << 30, 1 << 30))
    yield store
    store.close()


class Template:
    """A template of one shape: its text around messages and around their content."""

    def __init__(
        self, lead: str = "", trim: str = "", tail: str = "", end: str = "EOS\n", opening: str = ""
    ) -> None:
        self.opening = opening or "<|im_start|>assistant\n"
        self.lead, self.trim, self.tail, self.end = lead, trim, tail, end

    def source(self, eos: str) -> str:
        parts = (
            repr(p.replace("EOS", eos)) for p in (self.opening + self.lead, self.tail, self.end)
        )
        before, behind, end = parts
        return (
            "{%- for m in messages %}{%- if m.role == 'assistant' %}"
            f"{{{{ {before} + (m.content or '') {self.trim} }}}}"
            "{%- for c in m.tool_calls or [] %}"
            "{{ '\\n<tool_call>\\n' + c.function | tojson + '\\n</tool_call>' }}{%- endfor %}"
            f"{{{{ {behind} + {end} }}}}"
            "{%- else %}{{ '<|im_start|>user\\n' + m.content }}"
            f"{{{{ {end} }}}}"
            "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}"
            f"{{{{ {self.opening!r} }}}}{{%- endif %}}"
        )

    def of_reply(self, content: str) -> str:
        trimmed = {"": content, "| trim": content.strip()}[self.trim]
        return self.lead + trimmed + self.tail


def chat_with(tokenizer: Any, store: BlockStore, template: Template | str, **args: Any) -> Chat:
    source = template if isinstance(template, str) else template.source(tokenizer.eos_token)
    return Chat(tokenizer, store, f"chat-{next(_names)}", chat_template=source, **args)


def reply_with(chat: Chat, text: str, **options: Any) -> ChatTurn:
    ids = [*byte_ids(chat, text), chat.tokenizer.eos_token_id]
    return chat.turn([QUESTION], ids, **options)


def byte_ids(chat: Chat, text: str) -> list[int]:
    """Return an id for each byte of `text`: no tokenizer splits text like this."""
    single = {
        chat.tokens.to_bytes([i]): i
        for i in sorted(chat.tokenizer.get_vocab().values(), reverse=True)
    }
    specials = "|".join(re.escape(token) for token in EXTRA)
    ids = []
    for part in re.split(f"({specials})", text):
        if part in EXTRA:
            ids.append(single[part.encode()])
        else:
            ids += [single[bytes([byte])] for byte in part.encode()]
    return ids


def decoded(chat: Chat, ids: list[int]) -> str:
    return chat.tokens.decode(ids)


def follow_up(chat: Chat, turn: ChatTurn, **changes: Any) -> ChatTurn:
    """Send the reply back, perhaps changed, with a next question."""
    return chat.turn([QUESTION, {**turn.message, **changes}, NEXT], [chat.tokenizer.eos_token_id])


def original_ids_are_fed(turn: ChatTurn, after: ChatTurn) -> bool:
    """Tell whether a prompt begins with the ids that the turn before it read and produced."""
    own = [*turn.fed, *turn.reply[:-1]]
    return after.fed[: len(own)] == own and after.n_reused >= len(own)


def test_a_deleted_session_leaves_no_reply_behind(
    tmp_path: Path, tokenizers: dict[str, Any]
) -> None:
    """No file contains its text."""
    store = BlockStore(tmp_path / "store", StoreLimits(1 << 30, 1 << 30))
    chat = chat_with(tokenizers["byte-level"], store, Template())
    texts = " A secret ", " A public word "
    for text in texts:
        turn = reply_with(chat, text)
        (node,) = chain([*turn.fed, *turn.reply[:-1]], parent=chat.root.key)
        leaf = Leaf(text, node.key, node.stop)
        store.commit(Commit(chat.root, (node,), leaf), [(node, arrays_of(node))])
    store.drain()

    def is_in_files(text: str) -> bool:
        return any(
            text.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()
        )

    assert all(is_in_files(f'"{text}"') for text in texts)
    sessions = {session.name: session for session in store.index.sessions()}
    StoredSessions(store).delete(sessions[texts[0]].id)
    assert [is_in_files(f'"{text}"') for text in texts] == [False, True]
    store.close()


@every_pair(
    kind=KINDS,
    text=[" yes", "yes ", "\n\nyes\n", "  yes", "yes", " ", "ü🎉 ü"],
    trim=["", "| trim"],
)
def test_stripped_white_space_of_a_reply_is_restored(
    tokenizers: dict[str, Any], store: BlockStore, kind: str, text: str, trim: str
) -> None:
    """The server drops a leading space, and templates trim; all stored tokens are reused."""
    chat = chat_with(tokenizers[kind], store, Template(trim=trim))
    first = reply_with(chat, text)
    after = follow_up(chat, first)
    assert original_ids_are_fed(first, after)
    plain = decoded(chat, after.rendered)
    sent = first.message["content"]
    content = sent.strip() if trim else sent
    at = plain.rindex("assistant\n", 0, plain.rindex("And then?") - 20) + len("assistant\n")
    assert decoded(chat, after.fed) == plain[:at] + text + plain[at + len(content) :]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("metaspace")])
def test_a_space_that_the_template_writes_is_fed_once(
    tokenizers: dict[str, Any], store: BlockStore, kind: str
) -> None:
    """No space is added, and none is lost."""
    template = Template(lead=" ", end="EOS", opening="[INST]")
    chat = chat_with(tokenizers[kind], store, template)
    first = reply_with(chat, " Hello there")
    after = follow_up(chat, first)
    assert decoded(chat, after.fed) == decoded(chat, after.rendered)
    assert "[INST] Hello" in decoded(chat, after.fed)
    assert original_ids_are_fed(first, after)
    # For a reply without the space, the template's space is not part of the reply.
    chat = chat_with(tokenizers[kind], store, template)
    after = follow_up(chat, reply_with(chat, "Hello there"))
    assert after.fed == after.rendered


def test_white_space_that_the_template_adds_after_a_reply_is_kept(
    tokenizers: dict[str, Any], store: BlockStore
) -> None:
    chat = chat_with(tokenizers["metaspace-first"], store, Template(tail=" ", end="EOS"))
    after = follow_up(chat, reply_with(chat, " Hello"))
    assert decoded(chat, after.fed) == decoded(chat, after.rendered)
    assert "Hello </s>" in decoded(chat, after.fed)


@pytest.mark.parametrize("text", ["cafe\u0301", "A\u030a ngstro\u0308m"])
def test_a_reply_that_is_not_in_nfc_keeps_its_original_ids(
    tokenizers: dict[str, Any], store: BlockStore, text: str
) -> None:
    """The tokenizer normalises the returned text, so its ids are not the original ids."""
    chat = chat_with(tokenizers["byte-level-nfc"], store, Template())
    first = reply_with(chat, text)
    assert first.message["content"] == text
    after = follow_up(chat, first)
    assert text not in decoded(chat, after.rendered)
    assert text in decoded(chat, after.fed)
    assert original_ids_are_fed(first, after)


THINKING = (
    "{%- set ns = namespace(last=-1) %}{%- for m in messages %}{%- if m.role == 'user' %}"
    "{%- set ns.last = loop.index0 %}{%- endif %}{%- endfor %}"
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{%- if m.reasoning and (KEPT or loop.index0 > ns.last) %}"
    "{{ '<think>\\n' + m.reasoning.strip('\\n') + '\\n</think>\\n\\n' }}{%- endif %}"
    "{{ (m.content or '').lstrip('\\n') }}"
    "{%- for c in m.tool_calls or [] %}"
    "{%- if m.content.lstrip('\\n') or not loop.first %}{{ '\\n' }}{%- endif %}"
    "{{ '<tool_call>\\n' + {'name': c.function.name, 'arguments': c.function.arguments} | tojson"
    " + '\\n</tool_call>' }}{%- endfor %}"
    "{{ '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\nOPENED' }}{%- endif %}"
)
CALL = '<tool_call>\n{"name": "look",   "arguments": {"b":1, "a": [2 ]}}\n</tool_call>'
RESULT: Message = {"role": "tool", "content": "seen"}


def thinking(kept: bool = False, opened: bool = False) -> str:
    source = THINKING.replace("KEPT", str(kept).lower())
    return source.replace("OPENED", "<think>\\n" if opened else "")


@pytest.mark.parametrize("opened", [False, True], ids=["model-opens", "template-opens"])
@pytest.mark.parametrize("arguments", ['{"b":1,"a":[2]}', '{ "a" : [2], "b" : 1 }'])
def test_a_tool_call_after_reasoning_keeps_its_original_ids(
    tokenizers: dict[str, Any], store: BlockStore, opened: bool, arguments: str
) -> None:
    """The client may serialise the call differently; white space around reasoning may change."""
    chat = chat_with(tokenizers["byte-level"], store, thinking(opened=opened))
    begin = "" if opened else "<think>\n"
    first = reply_with(chat, f"{begin}Where is it?\n</think>\n\n\nLet me.\n\n{CALL}")
    calls = first.message["tool_calls"]
    assert first.message["reasoning"].strip() == "Where is it?"
    assert json.loads(calls[0]["function"]["arguments"]) == {"b": 1, "a": [2]}
    calls[0]["function"]["arguments"] = arguments
    end = [chat.tokenizer.eos_token_id]
    after = chat.turn([QUESTION, first.message, RESULT], end)
    assert original_ids_are_fed(first, after)
    assert CALL in decoded(chat, after.fed) and "seen" in decoded(chat, after.fed)
    # Edited arguments and edited reasoning do not get the original ids.
    edited = json.loads(json.dumps(first.message))
    edited["tool_calls"][0]["function"]["arguments"] = '{"b": 2, "a": [2]}'
    assert not original_ids_are_fed(first, chat.turn([QUESTION, edited, RESULT], end))
    edited = {**first.message, "reasoning": "Where was it?"}
    assert not original_ids_are_fed(first, chat.turn([QUESTION, edited, RESULT], end))


def test_reasoning_that_the_template_drops_is_not_fed(
    tokenizers: dict[str, Any], store: BlockStore
) -> None:
    chat = chat_with(tokenizers["byte-level"], store, thinking())
    first = reply_with(chat, "<think>\nWhere is it?\n</think>\n\nThere.")
    for changes in ({}, {"reasoning": ""}):
        after = follow_up(chat, first, **changes)
        assert after.fed == after.rendered
        assert "Where" not in decoded(chat, after.fed)
    kept = chat_with(tokenizers["byte-level"], store, thinking(kept=True))
    first = reply_with(kept, "<think>\n\nWhere is it?</think>There.")
    assert original_ids_are_fed(first, follow_up(kept, first))
    assert not original_ids_are_fed(first, follow_up(kept, first, reasoning=""))


def test_original_ids_are_not_fed_after_a_changed_prompt(
    tokenizers: dict[str, Any], store: BlockStore
) -> None:
    """Tools, template arguments or the date may have changed since the reply."""
    source = "{{ '<|im_start|>system\\n' + day + '<|im_end|>\\n' }}" + Template().source(
        "<|im_end|>"
    )
    chat = chat_with(tokenizers["byte-level"], store, source, day="Monday")
    first = reply_with(chat, " yes")
    assert original_ids_are_fed(first, follow_up(chat, first))
    chat.template_args["day"] = "Sunday"
    after = follow_up(chat, first)
    assert after.fed == after.rendered


def test_original_ids_are_fed_only_in_the_same_conversation(
    tokenizers: dict[str, Any], store: BlockStore
) -> None:
    chat = chat_with(tokenizers["byte-level"], store, Template())
    first = reply_with(chat, " yes")
    reply = first.message
    end = [chat.tokenizer.eos_token_id]
    parts = [{"type": "text", "text": "y"}, {"type": "text", "text": "es"}]
    for content in ("yes", parts):
        assert original_ids_are_fed(first, follow_up(chat, first, content=content))
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    for messages in (
        [{**QUESTION, "content": "What was it?"}, reply, NEXT],
        [reply, NEXT],
        [QUESTION, {**reply, "content": "yes "}, NEXT],
        [QUESTION, {**reply, "content": "yas"}, NEXT],
        [QUESTION, {**reply, "role": "user"}, NEXT],
        [QUESTION, {**reply, "tool_calls": [call]}, NEXT],
    ):
        turn = chat.turn(messages, end)
        assert " yes" not in decoded(chat, turn.fed).replace("yes ", "")


def test_equal_replies_of_one_conversation_keep_their_own_ids(
    tokenizers: dict[str, Any], store: BlockStore
) -> None:
    chat = chat_with(tokenizers["byte-level"], store, Template())
    first = reply_with(chat, " ok")
    second = chat.turn(
        [QUESTION, first.message, NEXT], [*byte_ids(chat, "ok "), chat.tokenizer.eos_token_id]
    )
    second.message["content"] = second.message["content"].strip()
    third = chat.turn([QUESTION, first.message, NEXT, second.message, NEXT], [0])
    assert original_ids_are_fed(first, second)
    assert decoded(chat, third.fed).count("\n ok<") == 1  # the second was edited: "ok " was sent
    fourth = chat.turn(
        [QUESTION, first.message, NEXT], [*byte_ids(chat, " ok"), chat.tokenizer.eos_token_id]
    )
    fifth = chat.turn([QUESTION, first.message, NEXT, fourth.message, NEXT], [0])
    assert original_ids_are_fed(fourth, fifth)


@pytest.mark.parametrize("stop", ["END", "\n\n"])
def test_a_reply_is_fed_up_to_its_stop_string(
    tokenizers: dict[str, Any], store: BlockStore, stop: str
) -> None:
    chat = chat_with(tokenizers["byte-level"], store, Template())
    ids = [*byte_ids(chat, " yes"), *byte_ids(chat, stop)]
    first = chat.turn([QUESTION], ids, stop_words=[stop])
    assert first.message["content"].strip() == "yes"
    after = follow_up(chat, first)
    own = [*first.fed, *byte_ids(chat, " yes")]
    assert after.fed[: len(own)] == own and after.n_reused >= len(own)
    assert stop + "<|im_end|>" not in decoded(chat, after.fed)


@every_pair(
    kind=KINDS, trim=["", "| trim"], text=[" yes and so", "caf\u00e9  on", " 🎉🎉 on\n\nand"]
)
def test_any_beginning_of_an_interrupted_reply_keeps_its_original_ids(
    tokenizers: dict[str, Any], store: BlockStore, kind: str, trim: str, text: str
) -> None:
    """The server does not know how much of the reply its client has read."""
    chat = chat_with(tokenizers[kind], store, Template(trim=trim))
    reply = byte_ids(chat, text)
    first = chat.turn([QUESTION], reply, finish_reason="length")
    whole = decoded(chat, reply)
    ends = {n: decoded(chat, reply[:n]) for n in range(1, len(reply))}
    for n, beginning in ends.items():
        if not beginning.strip() or "\ufffd" in beginning:
            continue
        after = follow_up(chat, first, content=beginning.removeprefix(" "))
        own = [*first.fed, *reply[:n]]
        if trim and beginning[-1:].isspace():
            own = own[: len(first.fed) + len(beginning.rstrip().encode())]
        assert after.fed[: len(own)] == own, (whole, beginning)
        assert after.n_reused >= len(own) - 1
        assert decoded(chat, after.fed).count(beginning.rstrip() if trim else beginning) == 1


def test_text_that_resembles_an_interrupted_reply_is_fed_as_rendered(
    tokenizers: dict[str, Any], store: BlockStore
) -> None:
    chat = chat_with(tokenizers["byte-level"], store, Template())
    first = chat.turn([QUESTION], byte_ids(chat, " yes and so"), finish_reason="length")
    for content in ("no and so", "yes and so on", "yes an so", "s and so", "", " "):
        after = follow_up(chat, first, content=content)
        assert after.fed == after.rendered
    other = [{**QUESTION, "content": "What was it?"}, first.message, NEXT]
    turn = chat.turn(other, [chat.tokenizer.eos_token_id])
    assert turn.fed == turn.rendered


@pytest.mark.parametrize("is_sent_first", [True, False])
def test_a_second_interrupted_reply_does_not_hide_the_first(
    tokenizers: dict[str, Any],
    store: BlockStore,
    monkeypatch: pytest.MonkeyPatch,
    is_sent_first: bool,
) -> None:
    """Either the ids of a reply or the text that its client received is known first."""
    chat = chat_with(tokenizers["byte-level"], store, Template())
    options: dict[str, Any] = {"isolated": False, "step_s": 0.0, "memory": mock.MagicMock()}
    serving = Serving(store, chat.loaded, print, **options)

    def as_served(
        messages: Any, prompt: list[int], reply: list[int], sent: Message, root: Any, *_: Any
    ) -> None:
        state = RequestState(root=root, messages=messages)
        state.sent = sent if is_sent_first else None
        state.produced = prompt, reply
        serving.remember(state)
        state.sent = sent
        serving.remember(state)

    monkeypatch.setattr("tests.support.chat.remember", as_served)
    first, second = (
        chat.turn([QUESTION], byte_ids(chat, said), finish_reason="length")
        for said in (" yes and", " no but")
    )
    for turn in (first, second):
        assert follow_up(chat, turn).fed[: turn.n_total] == [*turn.fed, *turn.reply]


def test_a_reply_cut_by_max_tokens_keeps_its_original_ids(
    tokenizers: dict[str, Any], store: BlockStore
) -> None:
    chat = chat_with(tokenizers["byte-level"], store, Template())
    first = chat.turn([QUESTION], byte_ids(chat, " yes and"), finish_reason="length")
    after = follow_up(chat, first)
    assert after.fed[: first.n_total] == [*first.fed, *first.reply]
    assert decoded(chat, after.fed).count(" yes and<|im_end|>") == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("said", [b" so ", " so 🎉".encode()[:-2], b" so\xff \xff\xff"])
def test_all_sent_tokens_of_a_cut_reply_are_fed(
    tokenizers: dict[str, Any], store: BlockStore, kind: str, said: bytes
) -> None:
    chat = chat_with(tokenizers[kind], store, Template())
    id_of = {chat.tokens.to_bytes([i]): i for i in sorted(chat.tokenizer.get_vocab().values())}
    ids = [id_of[bytes([n])] for n in said]
    first = chat.turn([QUESTION], ids, finish_reason="length")
    sent = ids[: len(ids) - n_not_sent(chat.tokenizer, ids)]
    after = follow_up(chat, first)
    assert len(sent) >= len(" so")
    assert after.fed[: len(first.fed) + len(sent)] == [*first.fed, *sent]
    assert after.n_reused == len(first.fed) + len(sent)
    end = chat.tokenizer.eos_token
    *_, behind = decoded(chat, after.rendered).split(end, 2)
    assert decoded(chat, after.fed) == decoded(chat, [*first.fed, *sent]) + end + behind


def test_a_reply_that_ends_inside_a_character_is_fed_as_sent(
    tokenizers: dict[str, Any], store: BlockStore
) -> None:
    chat = chat_with(tokenizers["byte-level"], store, Template())
    ids = [*byte_ids(chat, " so 🎉")[:-2], chat.tokenizer.eos_token_id]
    first = chat.turn([QUESTION], ids)
    after = follow_up(chat, first)
    if first.message["content"].endswith("\ufffd"):
        assert original_ids_are_fed(first, after)
    else:  # mlx-lm 0.31.3 does not send an incomplete character
        assert after.fed == after.rendered


@pytest.mark.parametrize("kind", KINDS)
def test_replies_of_random_bytes_are_reused_completely(
    tokenizers: dict[str, Any], store: BlockStore, kind: str
) -> None:
    """The replies have incomplete characters, zero bytes, and spaces at their ends."""
    tokenizer = tokenizers[kind]
    special = set(tokenizer.get_added_vocab().values()) | set(tokenizer.all_special_ids)
    plain = sorted(set(tokenizer.get_vocab().values()) - special)
    for seed in range(12):
        rng = random.Random(seed)
        chat = chat_with(tokenizer, store, Template())
        messages, before = [], 0
        for n in range(6):
            messages.append({"role": "user", "content": f"{n}. Grüße 🎉"})
            turn = chat.turn(messages, rng.choices(plain, k=60), finish_reason="length")
            assert turn.n_reused >= before, (seed, n)
            messages.append(turn.message)
            before = turn.n_total - n_not_sent(tokenizer, turn.reply)


def test_a_reply_without_stored_ids_is_reused_to_the_first_difference(
    tokenizers: dict[str, Any], store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an early kill the reply's ids are lost; its text matches up to the first difference."""
    chat = chat_with(tokenizers["byte-level"], store, Template())
    byte = {chat.tokens.to_bytes([i]): i for i in chat.tokenizer.get_vocab().values()}
    said = [byte[bytes([n])] for n in b"~\xff^~^~\0 yes"]
    with monkeypatch.context() as lost:
        lost.setattr("tests.support.chat.remember", lambda *args: None)
        first = chat.turn([QUESTION], said, finish_reason="length")
    talk = [QUESTION, first.message, NEXT]
    second = chat.turn(talk, byte_ids(chat, " yes"), finish_reason="length")
    assert second.n_reused == len(first.fed) + said.index(byte[b"\0"])
    talk += [second.message, NEXT]
    assert chat.turn(talk, byte_ids(chat, "no")).n_reused >= second.n_total


def test_an_empty_reply_is_fed_as_rendered(tokenizers: dict[str, Any], store: BlockStore) -> None:
    chat = chat_with(tokenizers["byte-level"], store, Template())
    first = reply_with(chat, "")
    after = follow_up(chat, first)
    assert after.fed == after.rendered
    assert after.n_reused == first.n_total


def test_a_reply_that_the_template_transforms_is_fed_as_rendered(
    tokenizers: dict[str, Any], store: BlockStore
) -> None:
    for change in ("| upper", "| length | string", "[1:]", ".replace('yes', '')"):
        chat = chat_with(tokenizers["byte-level"], store, Template(trim=change))
        after = follow_up(chat, reply_with(chat, " yes, yes"))
        assert after.fed == after.rendered


def test_retokenizing_a_prompt_keeps_its_segments(
    tokenizers: dict[str, Any], store: BlockStore
) -> None:
    chat = chat_with(tokenizers["byte-level"], store, Template())
    first = reply_with(chat, " yes")
    messages = [QUESTION, first.message, NEXT]
    ids = chat.render(messages)
    segments = [ids[:3], ids[3:-2], ids[-2:]]
    prompt = Prompt(ids, segments, ["system", "user", "user"], messages)
    made = retokenize(prompt, chat.root, store, chat.loaded)
    assert made.segment_types == prompt.segment_types
    assert [token for segment in made.segments for token in segment] == [*made.ids] != ids
    assert (made.segments[0], made.segments[-1]) == (prompt.segments[0], prompt.segments[-1])


templates = st.builds(
    Template,
    lead=st.sampled_from(["", " ", "\n", " \n"]),
    trim=st.sampled_from(["", "| trim"]),
    tail=st.sampled_from(["", " ", "\n"]),
    end=st.sampled_from(["EOS", "EOS\n", "\n", "\n\n"]),
    opening=st.sampled_from(["<|im_start|>assistant\n", "[INST]", "\nAnswer:"]),
)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(template=templates, kind=st.sampled_from(KINDS), data=st.data())
def test_the_fed_text_differs_from_the_rendering_only_in_replies(
    tokenizers: dict[str, Any], store: BlockStore, template: Template, kind: str, data: Any
) -> None:
    """The text of a reply is either its rendering or the text of its original ids."""
    tokenizer = tokenizers[kind]
    chat = chat_with(tokenizer, store, template)
    words = [byte_ids(chat, text) for text in (" ", "\n", "a", " b", "é", "é"[:1])]
    used = sorted(tokenizer.get_vocab().values())
    random_ids = st.sampled_from([i for i in used if i not in tokenizer.all_special_ids])
    piece = st.sampled_from(words) | st.lists(random_ids, min_size=1, max_size=4)
    messages: list[Message] = []
    replies: list[list[int]] = []
    for _ in range(data.draw(st.integers(1, 3))):
        messages.append(dict(QUESTION))
        reply = [i for ids in data.draw(st.lists(piece, max_size=4)) for i in ids]
        turn = chat.turn(messages, [*reply, tokenizer.eos_token_id])
        assert_reads_as_rendered(chat, turn, template, messages, replies)
        replies.append(reply)
        messages.append(turn.message)
    messages.append(dict(NEXT))
    turn = chat.turn(messages, [tokenizer.eos_token_id])
    assert_reads_as_rendered(chat, turn, template, messages, replies)


def assert_reads_as_rendered(
    chat: Chat,
    turn: ChatTurn,
    template: Template,
    messages: list[Message],
    replies: list[list[int]],
) -> None:
    """Check that the fed text is the rendering, with each reply as rendered or as produced."""
    assistant = [message for message in messages if message["role"] == "assistant"]
    whole = decoded(chat, turn.rendered)
    opening = template.opening.removeprefix("<|im_start|>")
    pattern, at = "", 0
    for message, reply in zip(assistant, replies, strict=True):
        start = whole.index(opening, at) + len(opening)
        pattern += re.escape(whole[at:start])
        content = decoded_after_break(chat, template.of_reply(message["content"]))
        at = whole.index(content, start) + len(content)
        as_rendered, own = whole[start:at], decoded(chat, reply)
        choices = [as_rendered]
        if "".join(own.split()) == "".join(as_rendered.split()):
            lead, tail = blank_ends(as_rendered)
            own_lead, own_tail = blank_ends(own)
            if own_lead.endswith(lead) and own_tail.startswith(tail):
                choices.append(own)
        pattern += "(?:" + "|".join(map(re.escape, choices)) + ")"
    pattern += re.escape(whole[at:])
    assert re.fullmatch(pattern, decoded(chat, turn.fed)), (whole, decoded(chat, turn.fed))


def blank_ends(text: str) -> tuple[str, str]:
    return text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]


def decoded_after_break(chat: Chat, text: str) -> str:
    """Return text as decoded after a line break: normalised, without a leading space."""
    return decoded(chat, chat.encode("\n" + text)).removeprefix(" ").removeprefix("\n")


def test_tool_calls_with_invalid_arguments_match_no_reply(store: BlockStore) -> None:
    for arguments in ("{", "[" * 100_000):
        function = {"name": "look", "arguments": arguments}
        message = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
        assert known_replies(store, Root("any", "none"), [message]) == {}


@pytest.mark.parametrize(
    "change",
    [{"ids": "no list"}, {"ids": [None]}, {"ids": [1 << 40]}, {"content": None}, {"more": 1}, None],
    ids=str,
)
def test_a_malformed_stored_reply_is_ignored(
    tokenizers: dict[str, Any], store: BlockStore, change: dict[str, object] | None
) -> None:
    chat = chat_with(tokenizers["byte-level"], store, Template(trim="| trim"))
    first = reply_with(chat, " yes ")
    ((key, packed),) = known_replies(store, chat.root, [QUESTION, first.message]).items()
    malformed = json.dumps({**json.loads(packed), **change}) if change else "[" * 100_000
    store.commit(Commit(chat.root, (), replies={key: malformed.encode()}), [])
    after = follow_up(chat, first)
    assert after.fed[: len(first.fed)] == first.fed
    assert decoded(chat, after.fed) == decoded(chat, after.rendered)
