"""Replies that clients send back: when the model's own ids are fed, and what the model reads."""

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
    ids = [*exactly(chat, text), chat.tokenizer.eos_token_id]
    return chat.turn([QUESTION], ids, **options)


def exactly(chat: Chat, text: str) -> list[int]:
    """Return ids that decode to `text`, one for each byte: no tokenizer cuts text like this."""
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


def read(chat: Chat, ids: list[int]) -> str:
    return chat.tokens.decode(ids)


def follow_up(chat: Chat, turn: ChatTurn, **changes: Any) -> ChatTurn:
    """Send the reply back, perhaps changed, with a next question."""
    return chat.turn([QUESTION, {**turn.message, **changes}, NEXT], [chat.tokenizer.eos_token_id])


def is_fed_as_it_was(turn: ChatTurn, after: ChatTurn) -> bool:
    """Tell whether a prompt begins with all that was read and produced in the turn before it."""
    own = [*turn.fed, *turn.reply[:-1]]
    return after.fed[: len(own)] == own and after.n_reused >= len(own)


@every_pair(
    kind=KINDS,
    text=[" yes", "yes ", "\n\nyes\n", "  yes", "yes", " ", "ü🎉 ü"],
    trim=["", "| trim"],
)
def test_white_space_of_a_reply_comes_back(
    tokenizers: dict[str, Any], store: BlockStore, kind: str, text: str, trim: str
) -> None:
    """The server drops a space in front, templates trim: still all stored tokens are found."""
    chat = chat_with(tokenizers[kind], store, Template(trim=trim))
    first = reply_with(chat, text)
    after = follow_up(chat, first)
    assert is_fed_as_it_was(first, after)
    plain = read(chat, after.rendered)
    sent = first.message["content"]
    content = sent.strip() if trim else sent
    at = plain.rindex("assistant\n", 0, plain.rindex("And then?") - 20) + len("assistant\n")
    assert read(chat, after.fed) == plain[:at] + text + plain[at + len(content) :]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith("metaspace")])
def test_a_template_that_writes_a_space_before_content(
    tokenizers: dict[str, Any], store: BlockStore, kind: str
) -> None:
    """No space is added, and none is lost."""
    template = Template(lead=" ", end="EOS", opening="[INST]")
    chat = chat_with(tokenizers[kind], store, template)
    first = reply_with(chat, " Hello there")
    after = follow_up(chat, first)
    assert read(chat, after.fed) == read(chat, after.rendered)
    assert "[INST] Hello" in read(chat, after.fed)
    assert is_fed_as_it_was(first, after)
    # A reply without the space: what the template writes is not the reply's.
    chat = chat_with(tokenizers[kind], store, template)
    after = follow_up(chat, reply_with(chat, "Hello there"))
    assert after.fed == after.rendered


def test_white_space_behind_a_reply_stays(tokenizers: dict[str, Any], store: BlockStore) -> None:
    chat = chat_with(tokenizers["metaspace-first"], store, Template(tail=" ", end="EOS"))
    after = follow_up(chat, reply_with(chat, " Hello"))
    assert read(chat, after.fed) == read(chat, after.rendered)
    assert "Hello </s>" in read(chat, after.fed)


@pytest.mark.parametrize("text", ["cafe\u0301", "A\u030a ngstro\u0308m"])
def test_a_reply_that_is_not_in_nfc(
    tokenizers: dict[str, Any], store: BlockStore, text: str
) -> None:
    """The tokenizer normalises the text that comes back: only the ids are the model's own."""
    chat = chat_with(tokenizers["byte-level-nfc"], store, Template())
    first = reply_with(chat, text)
    assert first.message["content"] == text
    after = follow_up(chat, first)
    assert text not in read(chat, after.rendered)
    assert text in read(chat, after.fed)
    assert is_fed_as_it_was(first, after)


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
def test_a_tool_call_after_reasoning(
    tokenizers: dict[str, Any], store: BlockStore, opened: bool, arguments: str
) -> None:
    """However the client serialises the call, and whatever white space is around thinking."""
    chat = chat_with(tokenizers["byte-level"], store, thinking(opened=opened))
    begin = "" if opened else "<think>\n"
    first = reply_with(chat, f"{begin}Where is it?\n</think>\n\n\nLet me.\n\n{CALL}")
    calls = first.message["tool_calls"]
    assert first.message["reasoning"].strip() == "Where is it?"
    assert json.loads(calls[0]["function"]["arguments"]) == {"b": 1, "a": [2]}
    calls[0]["function"]["arguments"] = arguments
    end = [chat.tokenizer.eos_token_id]
    after = chat.turn([QUESTION, first.message, RESULT], end)
    assert is_fed_as_it_was(first, after)
    assert CALL in read(chat, after.fed) and "seen" in read(chat, after.fed)
    # Other arguments make another call, and other thoughts make other reasoning.
    edited = json.loads(json.dumps(first.message))
    edited["tool_calls"][0]["function"]["arguments"] = '{"b": 2, "a": [2]}'
    assert not is_fed_as_it_was(first, chat.turn([QUESTION, edited, RESULT], end))
    edited = {**first.message, "reasoning": "Where was it?"}
    assert not is_fed_as_it_was(first, chat.turn([QUESTION, edited, RESULT], end))


def test_thinking_that_the_template_drops_is_not_fed(
    tokenizers: dict[str, Any], store: BlockStore
) -> None:
    chat = chat_with(tokenizers["byte-level"], store, thinking())
    first = reply_with(chat, "<think>\nWhere is it?\n</think>\n\nThere.")
    for changes in ({}, {"reasoning": ""}):
        after = follow_up(chat, first, **changes)
        assert after.fed == after.rendered
        assert "Where" not in read(chat, after.fed)
    kept = chat_with(tokenizers["byte-level"], store, thinking(kept=True))
    first = reply_with(kept, "<think>\n\nWhere is it?</think>There.")
    assert is_fed_as_it_was(first, follow_up(kept, first))
    assert not is_fed_as_it_was(first, follow_up(kept, first, reasoning=""))


def test_a_prompt_that_was_another_when_the_reply_was_made(
    tokenizers: dict[str, Any], store: BlockStore
) -> None:
    """Other tools, other template arguments, another date: the ids do not follow this prompt."""
    source = "{{ '<|im_start|>system\\n' + day + '<|im_end|>\\n' }}" + Template().source(
        "<|im_end|>"
    )
    chat = chat_with(tokenizers["byte-level"], store, source, day="Monday")
    first = reply_with(chat, " yes")
    assert is_fed_as_it_was(first, follow_up(chat, first))
    chat.template_args["day"] = "Sunday"
    after = follow_up(chat, first)
    assert after.fed == after.rendered


def test_only_in_the_conversation_that_led_to_it(
    tokenizers: dict[str, Any], store: BlockStore
) -> None:
    chat = chat_with(tokenizers["byte-level"], store, Template())
    first = reply_with(chat, " yes")
    reply = first.message
    end = [chat.tokenizer.eos_token_id]
    parts = [{"type": "text", "text": "y"}, {"type": "text", "text": "es"}]
    for content in ("yes", parts):
        assert is_fed_as_it_was(first, follow_up(chat, first, content=content))
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
        assert " yes" not in read(chat, turn.fed).replace("yes ", "")


def test_two_equal_replies_of_one_conversation(
    tokenizers: dict[str, Any], store: BlockStore
) -> None:
    chat = chat_with(tokenizers["byte-level"], store, Template())
    first = reply_with(chat, " ok")
    second = chat.turn(
        [QUESTION, first.message, NEXT], [*exactly(chat, "ok "), chat.tokenizer.eos_token_id]
    )
    second.message["content"] = second.message["content"].strip()
    third = chat.turn([QUESTION, first.message, NEXT, second.message, NEXT], [0])
    assert is_fed_as_it_was(first, second)
    assert read(chat, third.fed).count("\n ok<") == 1  # the second was edited: "ok " was sent
    fourth = chat.turn(
        [QUESTION, first.message, NEXT], [*exactly(chat, " ok"), chat.tokenizer.eos_token_id]
    )
    fifth = chat.turn([QUESTION, first.message, NEXT, fourth.message, NEXT], [0])
    assert is_fed_as_it_was(fourth, fifth)


@pytest.mark.parametrize("stop", ["END", "\n\n"])
def test_a_reply_is_fed_up_to_its_stop_string(
    tokenizers: dict[str, Any], store: BlockStore, stop: str
) -> None:
    chat = chat_with(tokenizers["byte-level"], store, Template())
    ids = [*exactly(chat, " yes"), *exactly(chat, stop)]
    first = chat.turn([QUESTION], ids, stop_words=[stop])
    assert first.message["content"].strip() == "yes"
    after = follow_up(chat, first)
    own = [*first.fed, *exactly(chat, " yes")]
    assert after.fed[: len(own)] == own and after.n_reused >= len(own)
    assert stop + "<|im_end|>" not in read(chat, after.fed)


@every_pair(
    kind=KINDS, trim=["", "| trim"], text=[" yes and so", "caf\u00e9  on", " 🎉🎉 on\n\nand"]
)
def test_any_beginning_of_an_interrupted_reply_is_found(
    tokenizers: dict[str, Any], store: BlockStore, kind: str, trim: str, text: str
) -> None:
    """Nobody knows how much of the reply its client has read."""
    chat = chat_with(tokenizers[kind], store, Template(trim=trim))
    reply = exactly(chat, text)
    first = chat.turn([QUESTION], reply, finish_reason="length")
    whole = read(chat, reply)
    ends = {n: read(chat, reply[:n]) for n in range(1, len(reply))}
    for n, beginning in ends.items():
        if not beginning.strip() or "\ufffd" in beginning:
            continue
        after = follow_up(chat, first, content=beginning.removeprefix(" "))
        own = [*first.fed, *reply[:n]]
        if trim and beginning[-1:].isspace():
            own = own[: len(first.fed) + len(beginning.rstrip().encode())]
        assert after.fed[: len(own)] == own, (whole, beginning)
        assert after.n_reused >= len(own) - 1
        assert read(chat, after.fed).count(beginning.rstrip() if trim else beginning) == 1


def test_what_only_resembles_an_interrupted_reply_is_fed_as_it_is_rendered(
    tokenizers: dict[str, Any], store: BlockStore
) -> None:
    chat = chat_with(tokenizers["byte-level"], store, Template())
    first = chat.turn([QUESTION], exactly(chat, " yes and so"), finish_reason="length")
    for content in ("no and so", "yes and so on", "yes an so", "s and so", "", " "):
        after = follow_up(chat, first, content=content)
        assert after.fed == after.rendered
    other = [{**QUESTION, "content": "What was it?"}, first.message, NEXT]
    turn = chat.turn(other, [chat.tokenizer.eos_token_id])
    assert turn.fed == turn.rendered


@pytest.mark.parametrize("is_sent_first", [True, False])
def test_a_later_answer_to_the_same_question_hides_none_that_was_cut(
    tokenizers: dict[str, Any],
    store: BlockStore,
    monkeypatch: pytest.MonkeyPatch,
    is_sent_first: bool,
) -> None:
    """Whether the ids of a reply are known first, or the text that its client got."""
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
        chat.turn([QUESTION], exactly(chat, said), finish_reason="length")
        for said in (" yes and", " no but")
    )
    for turn in (first, second):
        assert follow_up(chat, turn).fed[: turn.n_total] == [*turn.fed, *turn.reply]


def test_a_reply_that_max_tokens_cut(tokenizers: dict[str, Any], store: BlockStore) -> None:
    chat = chat_with(tokenizers["byte-level"], store, Template())
    first = chat.turn([QUESTION], exactly(chat, " yes and"), finish_reason="length")
    after = follow_up(chat, first)
    assert after.fed[: first.n_total] == [*first.fed, *first.reply]
    assert read(chat, after.fed).count(" yes and<|im_end|>") == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("said", [b" so ", " so 🎉".encode()[:-2], b" so\xff \xff\xff"])
def test_all_that_was_sent_of_a_reply_that_max_tokens_cut_is_fed(
    tokenizers: dict[str, Any], store: BlockStore, kind: str, said: bytes
) -> None:
    chat = chat_with(tokenizers[kind], store, Template())
    byte = {chat.tokens.to_bytes([i]): i for i in sorted(chat.tokenizer.get_vocab().values())}
    ids = [byte[bytes([n])] for n in said]
    first = chat.turn([QUESTION], ids, finish_reason="length")
    sent = ids[: len(ids) - n_not_sent(chat.tokenizer, ids)]
    after = follow_up(chat, first)
    assert len(sent) >= len(" so")
    assert after.fed[: len(first.fed) + len(sent)] == [*first.fed, *sent]
    assert after.n_reused == len(first.fed) + len(sent)
    end = chat.tokenizer.eos_token
    *_, behind = read(chat, after.rendered).split(end, 2)
    assert read(chat, after.fed) == read(chat, [*first.fed, *sent]) + end + behind


def test_a_reply_that_ends_inside_a_character(
    tokenizers: dict[str, Any], store: BlockStore
) -> None:
    chat = chat_with(tokenizers["byte-level"], store, Template())
    ids = [*exactly(chat, " so 🎉")[:-2], chat.tokenizer.eos_token_id]
    first = chat.turn([QUESTION], ids)
    after = follow_up(chat, first)
    if first.message["content"].endswith("\ufffd"):
        assert is_fed_as_it_was(first, after)
    else:  # mlx-lm 0.31.3 does not send what is incomplete
        assert after.fed == after.rendered


@pytest.mark.parametrize("kind", KINDS)
def test_replies_of_any_bytes_are_found_again(
    tokenizers: dict[str, Any], store: BlockStore, kind: str
) -> None:
    """A model that samples at random: bytes without a character, bytes 0, spaces at the ends."""
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


def test_a_reply_that_was_not_remembered_costs_what_differs_alone(
    tokenizers: dict[str, Any], store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a kill before it was written: its text matches up to the first difference."""
    chat = chat_with(tokenizers["byte-level"], store, Template())
    byte = {chat.tokens.to_bytes([i]): i for i in chat.tokenizer.get_vocab().values()}
    said = [byte[bytes([n])] for n in b"~\xff^~^~\0 yes"]
    with monkeypatch.context() as lost:
        lost.setattr("tests.support.chat.remember", lambda *args: None)
        first = chat.turn([QUESTION], said, finish_reason="length")
    talk = [QUESTION, first.message, NEXT]
    second = chat.turn(talk, exactly(chat, " yes"), finish_reason="length")
    assert second.n_reused == len(first.fed) + said.index(byte[b"\0"])
    talk += [second.message, NEXT]
    assert chat.turn(talk, exactly(chat, "no")).n_reused >= second.n_total


def test_an_empty_reply(tokenizers: dict[str, Any], store: BlockStore) -> None:
    chat = chat_with(tokenizers["byte-level"], store, Template())
    first = reply_with(chat, "")
    after = follow_up(chat, first)
    assert after.fed == after.rendered
    assert after.n_reused == first.n_total


def test_a_template_that_does_more_than_to_place_a_reply(
    tokenizers: dict[str, Any], store: BlockStore
) -> None:
    for change in ("| upper", "| length | string", "[1:]", ".replace('yes', '')"):
        chat = chat_with(tokenizers["byte-level"], store, Template(trim=change))
        after = follow_up(chat, reply_with(chat, " yes, yes"))
        assert after.fed == after.rendered


def test_segments_survive_another_spelling(tokenizers: dict[str, Any], store: BlockStore) -> None:
    chat = chat_with(tokenizers["byte-level"], store, Template())
    first = reply_with(chat, " yes")
    messages = [QUESTION, first.message, NEXT]
    ids = chat.render(messages)
    segments = [ids[:3], ids[3:-2], ids[-2:]]
    prompt = Prompt(ids, segments, ["system", "user", "assistant"], messages)
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
def test_what_is_read_differs_from_the_rendering_in_replies_only(
    tokenizers: dict[str, Any], store: BlockStore, template: Template, kind: str, data: Any
) -> None:
    """The text of a reply is its rendering, or the text of its ids: nothing else."""
    tokenizer = tokenizers[kind]
    chat = chat_with(tokenizer, store, template)
    words = [exactly(chat, text) for text in (" ", "\n", "a", " b", "é", "é"[:1])]
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
    """Fit the text that was fed to the rendering, each reply rendered or its own."""
    assistant = [message for message in messages if message["role"] == "assistant"]
    whole = read(chat, turn.rendered)
    opening = template.opening.removeprefix("<|im_start|>")
    pattern, at = "", 0
    for message, reply in zip(assistant, replies, strict=True):
        start = whole.index(opening, at) + len(opening)
        pattern += re.escape(whole[at:start])
        content = read_again(chat, template.of_reply(message["content"]))
        at = whole.index(content, start) + len(content)
        as_rendered, own = whole[start:at], read(chat, reply)
        choices = [as_rendered]
        if "".join(own.split()) == "".join(as_rendered.split()):
            lead, tail = blank_ends(as_rendered)
            own_lead, own_tail = blank_ends(own)
            if own_lead.endswith(lead) and own_tail.startswith(tail):
                choices.append(own)
        pattern += "(?:" + "|".join(map(re.escape, choices)) + ")"
    pattern += re.escape(whole[at:])
    assert re.fullmatch(pattern, read(chat, turn.fed)), (whole, read(chat, turn.fed))


def blank_ends(text: str) -> tuple[str, str]:
    return text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]


def read_again(chat: Chat, text: str) -> str:
    """Return text as it is read after a line break: normalised, without a space in front."""
    return read(chat, chat.encode("\n" + text)).removeprefix(" ").removeprefix("\n")


def test_arguments_that_cannot_be_parsed_are_no_obstacle(store: BlockStore) -> None:
    for arguments in ("{", "[" * 100_000):
        function = {"name": "look", "arguments": arguments}
        message = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
        assert known_replies(store, Root("any", "none"), [message]) == {}


@pytest.mark.parametrize(
    "change",
    [{"ids": "no list"}, {"ids": [None]}, {"ids": [1 << 40]}, {"content": None}, {"more": 1}, None],
    ids=str,
)
def test_a_malformed_reply_of_another_server_is_none(
    tokenizers: dict[str, Any], store: BlockStore, change: dict[str, object] | None
) -> None:
    chat = chat_with(tokenizers["byte-level"], store, Template(trim="| trim"))
    first = reply_with(chat, " yes ")
    ((key, packed),) = known_replies(store, chat.root, [QUESTION, first.message]).items()
    malformed = json.dumps({**json.loads(packed), **change}) if change else "[" * 100_000
    store.commit(Commit(chat.root, (), replies={key: malformed.encode()}), [])
    after = follow_up(chat, first)
    assert after.fed[: len(first.fed)] == first.fed
    assert read(chat, after.fed) == read(chat, after.rendered)
