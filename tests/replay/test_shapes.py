"""Conversations as real clients send them: how many tokens each turn reuses, exactly.

The shapes are from real clients' requests; the texts are made up. Expectations are counted
in the ids of earlier turns: all of a turn, all of its prompt, or the tokens that the two texts have
in common. A turn that leaves a stored one inside a block may compute that block again from its
beginning, or from the end of an earlier prompt in it, and no more.
"""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest

from mlx_lm_kvpersist.cache.blocks import BLOCK_TOKENS
from mlx_lm_kvpersist.request.lookup import MIN_TOKENS
from mlx_lm_kvpersist.request.outcome import Kind
from tests.support import make_tiny_model, synthetic_text

from .conftest import MakeReplayer
from .replayer import Message, Replayer, Turn

SYSTEM: Message = {"role": "system", "content": "You keep a light house.\n" + synthetic_text(650)}
QUESTIONS = [
    "What does the north tower see at noon?",
    "Grüße vom Meer 🎉! Who lights the lamp?",
    "And when the fog comes in?",
    "How far is the island, in miles?",
]
REPLIES = ["The whole bay.", "Ida does, grüßt sie 🎉.", "Then the horn sounds.", "Seven miles."]


def user(content: Any) -> Message:
    return {"role": "user", "content": content}


def talk(
    replayer: Replayer, session: str | None = "s", n_turns: int = 3, system: Message = SYSTEM
) -> tuple[list[Message], list[Turn]]:
    """Have turns that only append; return the messages and the result of each turn."""
    messages, turns = [system], []
    for question, reply in zip(QUESTIONS[:n_turns], REPLIES, strict=False):
        messages.append(user(question))
        turns.append(replayer.turn(messages, reply, session))
        messages.append(turns[-1].message)
    return messages, turns


def assert_reuses(replayer: Replayer, turn: Turn, n_tokens: int) -> None:
    """Exactly these tokens, or all up to a point in their last block: its start, a prompt's end."""
    assert n_tokens >= BLOCK_TOKENS
    begin = n_tokens - n_tokens % BLOCK_TOKENS
    ends = {end for end in replayer.prompt_ends if begin < end < n_tokens}
    assert turn.n_reused in {begin, n_tokens, *ends}


def shared(replayer: Replayer, stored: Turn, asked: Turn) -> int:
    """Return how many of a stored turn's tokens are the beginning of another turn's prompt."""
    return replayer.n_reusable(stored.ids, replayer.bytes_of(asked.prompt))


def up_to(replayer: Replayer, turn: Turn, text: str) -> int:
    """Return how many of a turn's tokens come before the last `text` in its prompt."""
    prompt = replayer.bytes_of(turn.prompt)
    return replayer.n_common(turn.ids, prompt[: prompt.rindex(text.encode())])


@pytest.mark.parametrize("restarted", [False, True], ids=["hot", "restarted"])
def test_append_only(replayer: Replayer, restarted: bool) -> None:
    messages = [SYSTEM]
    expected = 0
    for question, reply in zip(QUESTIONS, REPLIES, strict=True):
        messages.append(user(question))
        turn = replayer.turn(messages, reply, "s")
        assert turn.n_reused == expected
        assert turn.kind is (Kind.EXTEND if expected else Kind.MISS)
        messages.append(turn.message)
        expected = turn.n_total
        if restarted:
            replayer.restart()


@pytest.mark.parametrize("k", [0, 1, 2, 3, 5], ids=lambda k: f"message-{k}")
def test_edit_of_a_message(replayer: Replayer, k: int) -> None:
    messages, turns = talk(replayer)
    edited = copy.deepcopy(messages[:-1])
    content = edited[k]["content"]
    edited[k]["content"] = content[: len(content) // 2] + "; or no, " + content[len(content) // 2 :]
    turn = replayer.turn(edited, "I see.", "s")
    assert turn.kind is Kind.DIVERGE
    assert_reuses(replayer, turn, shared(replayer, turns[-1], turn))
    assert turn.n_reused < turns[-1].n_prompt
    # The edited branch continues from its own end.
    more = replayer.turn([*edited, turn.message, user("Go on.")], "Yes.", "s")
    assert more.n_reused == turn.n_total


def test_branch_and_return(replayer: Replayer) -> None:
    messages, turns = talk(replayer)
    branch = [*messages[:3], user("Rather tell me of the keeper.")]
    first = replayer.turn(branch, "He is old.", "s")
    common = shared(replayer, turns[-1], first)
    assert common >= turns[0].n_total
    assert_reuses(replayer, first, common)
    branch += [first.message, user("How old?")]
    second = replayer.turn(branch, "Ninety.", "s")
    assert second.n_reused == first.n_total
    returned = replayer.turn([*messages, user("Back to the fog.")], "It lifts.", "s")
    assert returned.n_reused == turns[-1].n_total
    again = replayer.turn([*branch, second.message, user("And tall?")], "No.", "s")
    assert again.n_reused == second.n_total


def tool(name: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"place": {"type": "string"}}}
    function = {"name": name, "description": f"To {name}.", "parameters": parameters}
    return {"type": "function", "function": function}


def test_tool_insertion(replayer: Replayer) -> None:
    """Tools come before everything else, so a new tool ends reuse at its position."""
    question = [SYSTEM, user(QUESTIONS[0])]
    names = ["ask", "beg", "dare", "doubt", "wave"]
    few, more = (
        [tool(name) for name in names_] for names_ in (names, [*names[:-1], "find", "wave"])
    )
    first = replayer.turn(question, REPLIES[0], "s", tools=few)
    messages = [*question, first.message, user(QUESTIONS[1])]
    inserted = replayer.turn(messages, REPLIES[1], "s", tools=more)
    assert_reuses(replayer, inserted, shared(replayer, first, inserted))
    assert inserted.n_reused < up_to(replayer, first, "You keep")
    assert first.n_prompt > 2 * inserted.n_reused
    messages += [inserted.message, user(QUESTIONS[2])]
    kept = replayer.turn(messages, REPLIES[2], "s", tools=more)
    assert kept.n_reused == inserted.n_total
    back = replayer.turn([*question, first.message, user("Hm.")], "Hm?", "s", tools=few)
    assert back.n_reused == first.n_total


def test_a_reminder_that_moves(replayer: Replayer) -> None:
    """opencode and other clients append it to the newest user message: the cut is at its begin."""
    reminder = "\n<system-reminder>Plan only, change nothing.</system-reminder>"
    messages: list[Message] = [SYSTEM]
    before: Turn | None = None
    for question, reply in zip(QUESTIONS, REPLIES, strict=True):
        messages.append(user(question))
        sent = [*messages[:-1], user(question + reminder)]
        turn = replayer.turn(sent, reply, "s")
        if before is not None:
            assert_reuses(replayer, turn, up_to(replayer, before, reminder))
            assert turn.kind is Kind.DIVERGE
        before = turn
        messages.append(turn.message)


THINKING_TEMPLATE = (
    "{%- for m in messages %}"
    "{%- set content = m.content or '' %}"
    "{%- if m.role == 'assistant' and '</think>' in content %}"
    "{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
    "{{ '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}OPENED{%- endif %}"
)


@pytest.mark.parametrize(
    ("sent_back", "opened"),
    [
        ("dropped", True),
        ("reasoning", False),
        ("inline", True),
        *(
            pytest.param(sent_back, opened, marks=pytest.mark.slow)
            for sent_back, opened in (("dropped", False), ("reasoning", True), ("inline", False))
        ),
    ],
)
def test_thinking_that_the_template_strips(
    make_replayer: MakeReplayer, models_dir: Path, opened: bool, sent_back: str
) -> None:
    """The cut is right before the old thinking; later turns extend the prompt without it."""
    begin = "{{ '<think>\\n' }}" if opened else ""
    model = make_tiny_model(
        models_dir / f"thinking-{opened}",
        chat_template=THINKING_TEMPLATE.replace("OPENED", begin),
        extra_special_tokens=("<think>", "</think>"),
    )
    replayer = make_replayer(model)
    thought = "Which tower? The north one.\n</think>\n\n"
    messages: list[Message] = [SYSTEM]
    expected = 0
    for question, reply in zip(QUESTIONS, REPLIES, strict=True):
        messages.append(user(question))
        turn = replayer.turn(messages, ("" if opened else "<think>\n") + thought + reply, "s")
        if expected:
            assert_reuses(replayer, turn, expected)
        expected = turn.n_prompt - (len(replayer.encode("<think>\n")) if opened else 0)
        message = turn.message
        answer = message["content"].lstrip("\n")
        message = {**message, "content": answer}
        if sent_back != "reasoning":
            message.pop("reasoning")
        if sent_back == "inline":
            message["content"] = f"<think>\n{thought}{answer}"
        messages.append(message)
    # The same request again: all of it is stored.
    again = replayer.turn(messages[:-1], "", "s")
    assert again.kind is Kind.EXACT
    assert_reuses(replayer, again, again.n_prompt - 1)


def test_thinking_is_computed_once_more_and_then_never(
    make_replayer: MakeReplayer, models_dir: Path
) -> None:
    """With short questions and long answers: text after the thinking is stored a turn later."""
    model = make_tiny_model(
        models_dir / "thinking-long",
        chat_template=THINKING_TEMPLATE.replace("OPENED", ""),
        extra_special_tokens=("<think>", "</think>"),
    )
    replayer = make_replayer(model)
    answer = synthetic_text(300, seed=5)
    first = replayer.turn([SYSTEM, user("One?")], f"<think>\nHm.\n</think>\n\n{answer}")
    messages = [SYSTEM, user("One?"), {"role": "assistant", "content": answer}, user("Two?")]
    second = replayer.turn(messages, "<think>\nHm.\n</think>\n\nYes.")
    assert_reuses(replayer, second, first.n_prompt)
    third = replayer.turn([*messages[:3], user("Three?")], "No.")
    common = shared(replayer, second, third)
    assert common > first.n_prompt + len(replayer.encode(answer))
    assert_reuses(replayer, third, common)


TRIMMING_TEMPLATE = (
    "{%- for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\\n' + (m.content or '') | trim + '<|im_end|>\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"
)


@pytest.fixture
def trimming(make_replayer: MakeReplayer, models_dir: Path) -> Replayer:
    return make_replayer(make_tiny_model(models_dir / "trimming", chat_template=TRIMMING_TEMPLATE))


@pytest.mark.parametrize(
    "reply", [" The whole bay.", "\n\nThe whole bay.", "The whole bay. \n", "The whole bay."]
)
def test_a_reply_that_the_template_trims(trimming: Replayer, reply: str) -> None:
    messages = [SYSTEM, user(QUESTIONS[0])]
    first = trimming.turn(messages, reply, "s")
    second = trimming.turn([*messages, first.message, user(QUESTIONS[1])], "Ida.", "s")
    assert second.n_reused == first.n_total


@pytest.mark.parametrize(
    ("said", "again", "separators"),
    [
        (
            '{"name": "wave", "arguments": {"place": "bay", "times": 2}}',
            {"place": "bay", "times": 2},
            (",", ":"),
        ),
        (
            '{"name":"wave","arguments":{"times":2,"place":"Küste"}}',
            {"place": "Küste", "times": 2},
            (", ", ": "),
        ),
        ('{ "name" : "wave",\n  "arguments" : { } }', {}, (" , ", " : ")),
    ],
    ids=["compact", "other-order", "empty"],
)
def test_tool_arguments_serialised_anew(
    replayer: Replayer, said: str, again: dict[str, Any], separators: tuple[str, str]
) -> None:
    tools = [tool("wave")]
    messages = [SYSTEM, user(QUESTIONS[0])]
    reply = f"Let me.\n<tool_call>\n{said}\n</tool_call>"
    first = replayer.turn(messages, reply, "s", tools=tools)
    returned = copy.deepcopy(first.message)
    assert json.loads(returned["tool_calls"][0]["function"]["arguments"]) == again
    returned["tool_calls"][0]["function"]["arguments"] = json.dumps(
        again, separators=separators, ensure_ascii=False
    )
    messages += [returned, {"role": "tool", "tool_call_id": "call-0", "content": "They wave back."}]
    second = replayer.turn(messages, "Done.", "s", tools=tools)
    assert second.n_reused == first.n_total
    messages += [second.message, user(QUESTIONS[1])]
    third = replayer.turn(messages, "Ida.", "s", tools=tools)
    assert third.n_reused == second.n_total


def test_other_tool_arguments_are_not_what_was_said(replayer: Replayer) -> None:
    tools = [tool("wave")]
    messages = [SYSTEM, user(QUESTIONS[0])]
    reply = '<tool_call>\n{"name":"wave","arguments":{"place":"bay"}}\n</tool_call>'
    first = replayer.turn(messages, reply, "s", tools=tools)
    returned = copy.deepcopy(first.message)
    returned["tool_calls"][0]["function"]["arguments"] = '{"place": "bar"}'
    result = {"role": "tool", "tool_call_id": "call-0", "content": "They wave back."}
    second = replayer.turn([*messages, returned, result], "Done.", "s", tools=tools)
    assert second.n_reused == shared(replayer, first, second) < first.n_total
    assert b"bar" in replayer.bytes_of(second.prompt)


def test_a_title_request_beside_each_turn(replayer: Replayer) -> None:
    """Claude Code and opencode send it under the main conversation's key."""
    titles: Message = {"role": "system", "content": "Write a title of five words, no more."}
    messages: list[Message] = [SYSTEM]
    main = side = 0
    for question, reply in zip(QUESTIONS, REPLIES, strict=True):
        messages.append(user(question))
        title = replayer.turn([titles, user(f"Title for: {QUESTIONS[0]}")], "Light over a bay", "s")
        if side:
            assert title.n_reused == title.n_prompt - 1
        side += 1
        turn = replayer.turn(messages, reply, "s")
        if main:
            assert turn.n_reused == main
        else:
            common = shared(replayer, title, turn)  # the chat template's first words
            assert turn.n_reused == (common if common >= MIN_TOKENS else 0)
        main = turn.n_total
        messages.append(turn.message)


def test_a_subagent_under_the_same_key(replayer: Replayer) -> None:
    agent: Message = {
        "role": "system",
        "content": "You search files.\n" + synthetic_text(120, seed=8),
    }
    threads: list[list[Message]] = [[SYSTEM], [agent]]
    totals = [0, 0]
    for n, (question, reply) in enumerate(zip(QUESTIONS, REPLIES, strict=True)):
        for i, messages in enumerate(threads):
            messages.append(user(f"{question} ({i})"))
            turn = replayer.turn(messages, reply, "s")
            if n:
                assert turn.n_reused == totals[i]
            messages.append(turn.message)
            totals[i] = turn.n_total


@pytest.mark.parametrize("n_talks", [10, pytest.param(50, marks=pytest.mark.slow)])
def test_many_anonymous_conversations(replayer: Replayer, n_talks: int) -> None:
    """Without any key, all of them begin alike, and half of the answers come after a restart."""
    system: Message = {"role": "system", "content": "You are brief, and kind to all who ask."}
    talks = [[system, user(f"{n} ships, where to?")] for n in range(n_talks)]
    firsts: list[Turn] = []
    for n, messages in enumerate(talks):
        turn = replayer.turn(messages, f"To port {n}.")
        # Of many siblings only the nearest by text are compared: another may share a token more.
        assert turn.n_reused >= max((shared(replayer, f, turn) for f in firsts), default=0) - 1
        firsts.append(turn)
    for i, n in enumerate(sorted(range(n_talks), key=lambda n: n * 7 % n_talks)):
        if i == n_talks // 2:
            replayer.restart()
        messages = [*talks[n], firsts[n].message, user("When?")]
        turn = replayer.turn(messages, "Soon.")
        assert (turn.kind, turn.n_reused) == (Kind.EXTEND, firsts[n].n_total)


def claude_code(messages: list[Message], turn: int) -> list[Message]:
    """Return messages as Claude Code sends them: a billing line that changes, marks that move."""
    sent = copy.deepcopy(messages)
    billing = f"x-anthropic-billing-header: cc_version=2.1.173; cch={turn * 7919 % 99991:05x};"
    mark = {"type": "ephemeral"}
    sent[0]["content"] = [
        {"type": "text", "text": billing},
        {"type": "text", "text": sent[0]["content"], "cache_control": mark},
    ]
    newest = sent[-1]
    newest["content"] = [{"type": "text", "text": newest["content"], "cache_control": mark}]
    return sent


def test_claude_codes_billing_line_and_moving_marks(replayer: Replayer) -> None:
    messages: list[Message] = [SYSTEM]
    headers = {"X-Claude-Code-Session-Id": "0b5e", "User-Agent": "claude-cli/2.1.173"}
    expected = 0
    for n, (question, reply) in enumerate(zip(QUESTIONS, REPLIES, strict=True)):
        messages.append(user(question))
        turn = replayer.turn(claude_code(messages, n), reply, headers=headers)
        assert turn.n_reused == expected
        assert b"billing" not in replayer.bytes_of(turn.prompt)
        messages.append(turn.message)
        expected = turn.n_total


SPELLED = "In ChatML <|im_start|> begins a turn and <|im_end|> ends it; <|endoftext|> ends all."


@pytest.mark.parametrize("restarted", [False, True], ids=["hot", "restarted"])
def test_a_reply_that_spells_control_tokens_is_read_as_it_is_rendered(
    replayer: Replayer, make_replayer: MakeReplayer, tiny_model: Path, restarted: bool
) -> None:
    """The model writes them with ordinary tokens; rendered, they are control tokens."""
    messages = [SYSTEM, user(QUESTIONS[0])]
    parts = re.split(r"(<\|\w+\|>)", SPELLED)
    words = [word for n, part in enumerate(parts) for word in (part if n % 2 else [part])]
    first = replayer.turn(messages, [i for word in words for i in replayer.encode(word)], "s")
    messages += [first.message, user(QUESTIONS[1])]
    assert messages[2]["content"] == SPELLED
    if restarted:
        replayer.restart()
    second = replayer.turn(messages, "Ida.", "s")
    cold = make_replayer(tiny_model).turn(messages, "Ida.", "s")
    assert second.prompt == cold.prompt
    assert first.n_prompt - BLOCK_TOKENS <= second.n_reused < first.n_prompt + len("In ChatML ")
    # From the next turn on all is found.
    third = replayer.turn([*messages, second.message, user(QUESTIONS[2])], "Seven.", "s")
    assert third.n_reused == second.n_total
