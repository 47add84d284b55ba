"""The exact number of tokens that each turn reuses, in conversations like those of real clients.

The structure is from real clients' requests; the texts are made up. The expected number counts ids
of an earlier turn: the whole turn, its whole prompt, or the common prefix of both texts. If a turn
diverges inside a stored block, only this block may be computed again, from its start or from the
end of an earlier prompt in it.
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
    """Run turns that only append messages; return the messages and each turn's result."""
    messages, turns = [system], []
    for question, reply in zip(QUESTIONS[:n_turns], REPLIES, strict=False):
        messages.append(user(question))
        turns.append(replayer.turn(messages, reply, session))
        messages.append(turns[-1].message)
    return messages, turns


def assert_reuses(replayer: Replayer, turn: Turn, n_tokens: int) -> None:
    """Accept exactly `n_tokens`, or only up to their last block's start or a prompt's end in it."""
    assert n_tokens >= BLOCK_TOKENS
    begin = n_tokens - n_tokens % BLOCK_TOKENS
    ends = {end for end in replayer.prompt_ends if begin < end < n_tokens}
    assert turn.n_reused in {begin, n_tokens, *ends}


def shared(replayer: Replayer, stored: Turn, later: Turn) -> int:
    """Return how many of a stored turn's first tokens a later turn's prompt can reuse."""
    return replayer.n_reusable(stored.ids, replayer.bytes_of(later.prompt))


def up_to(replayer: Replayer, turn: Turn, text: str) -> int:
    """Return how many of a turn's tokens come before the last `text` in its prompt."""
    prompt = replayer.bytes_of(turn.prompt)
    return replayer.n_common(turn.ids, prompt[: prompt.rindex(text.encode())])


@pytest.mark.parametrize("restarted", [False, True], ids=["hot", "restarted"])
def test_appending_turn_reuses_the_whole_previous_turn(replayer: Replayer, restarted: bool) -> None:
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


@pytest.mark.parametrize("number", [0, 1, 2, 3, 5], ids=lambda number: f"message-{number}")
def test_edited_message_ends_reuse_at_the_edit(replayer: Replayer, number: int) -> None:
    messages, turns = talk(replayer)
    edited = copy.deepcopy(messages[:-1])
    content = edited[number]["content"]
    edited[number]["content"] = (
        content[: len(content) // 2] + "; or no, " + content[len(content) // 2 :]
    )
    turn = replayer.turn(edited, "I see.", "s")
    assert turn.kind is Kind.DIVERGE
    assert_reuses(replayer, turn, shared(replayer, turns[-1], turn))
    assert turn.n_reused < turns[-1].n_prompt
    # The edited branch continues from its own end.
    more = replayer.turn([*edited, turn.message, user("Go on.")], "Yes.", "s")
    assert more.n_reused == turn.n_total


def test_both_branches_of_a_conversation_are_reused(replayer: Replayer) -> None:
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


def test_inserted_tool_ends_reuse_at_its_position(replayer: Replayer) -> None:
    """The template renders tools before everything else."""
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


def test_moved_reminder_ends_reuse_at_its_old_position(replayer: Replayer) -> None:
    """opencode and other clients append the reminder to the newest user message."""
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
def test_reuse_ends_before_thinking_that_the_template_strips(
    make_replayer: MakeReplayer, models_dir: Path, opened: bool, sent_back: str
) -> None:
    """Later turns extend the prompt without thinking."""
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
    # A repetition of the last request finds all of it stored.
    again = replayer.turn(messages[:-1], "", "s")
    assert again.kind is Kind.EXACT
    assert_reuses(replayer, again, again.n_prompt - 1)


def test_answer_after_stripped_thinking_is_recomputed_only_once(
    make_replayer: MakeReplayer, models_dir: Path
) -> None:
    """The next turn computes and stores the answer without the thinking."""
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
def test_reply_that_the_template_trims_is_reused(trimming: Replayer, reply: str) -> None:
    messages = [SYSTEM, user(QUESTIONS[0])]
    first = trimming.turn(messages, reply, "s")
    second = trimming.turn([*messages, first.message, user(QUESTIONS[1])], "Ida.", "s")
    assert second.n_reused == first.n_total


@pytest.mark.parametrize(
    ("written", "arguments", "separators"),
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
def test_reserialized_tool_arguments_are_reused(
    replayer: Replayer, written: str, arguments: dict[str, Any], separators: tuple[str, str]
) -> None:
    tools = [tool("wave")]
    messages = [SYSTEM, user(QUESTIONS[0])]
    reply = f"Let me.\n<tool_call>\n{written}\n</tool_call>"
    first = replayer.turn(messages, reply, "s", tools=tools)
    returned = copy.deepcopy(first.message)
    assert json.loads(returned["tool_calls"][0]["function"]["arguments"]) == arguments
    returned["tool_calls"][0]["function"]["arguments"] = json.dumps(
        arguments, separators=separators, ensure_ascii=False
    )
    messages += [returned, {"role": "tool", "tool_call_id": "call-0", "content": "They wave back."}]
    second = replayer.turn(messages, "Done.", "s", tools=tools)
    assert second.n_reused == first.n_total
    messages += [second.message, user(QUESTIONS[1])]
    third = replayer.turn(messages, "Ida.", "s", tools=tools)
    assert third.n_reused == second.n_total


def test_changed_tool_arguments_end_reuse(replayer: Replayer) -> None:
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


def test_title_requests_do_not_reduce_the_main_conversations_reuse(replayer: Replayer) -> None:
    """Claude Code and opencode send title requests under the main conversation's key."""
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


def test_subagent_and_main_conversation_under_one_key_are_reused(replayer: Replayer) -> None:
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
def test_anonymous_conversations_with_a_common_prefix_are_reused(
    replayer: Replayer, n_talks: int
) -> None:
    """Requests have no session key, and half of the second turns come after a restart."""
    system: Message = {"role": "system", "content": "You are brief, and kind to all who ask."}
    talks = [[system, user(f"{n} ships, where to?")] for n in range(n_talks)]
    firsts: list[Turn] = []
    for n, messages in enumerate(talks):
        turn = replayer.turn(messages, f"To port {n}.")
        # Only the nearest siblings by text are compared; another may share one more token.
        assert turn.n_reused >= max((shared(replayer, f, turn) for f in firsts), default=0) - 1
        firsts.append(turn)
    for i, n in enumerate(sorted(range(n_talks), key=lambda n: n * 7 % n_talks)):
        if i == n_talks // 2:
            replayer.restart()
        messages = [*talks[n], firsts[n].message, user("When?")]
        turn = replayer.turn(messages, "Soon.")
        assert (turn.kind, turn.n_reused) == (Kind.EXTEND, firsts[n].n_total)


def claude_code(messages: list[Message], turn: int) -> list[Message]:
    """Return messages as Claude Code sends them: the billing line changes, cache marks move."""
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


def test_claude_codes_billing_line_and_cache_marks_keep_reuse(replayer: Replayer) -> None:
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
def test_spelled_control_tokens_in_a_reply_are_read_as_rendered(
    replayer: Replayer, make_replayer: MakeReplayer, tiny_model: Path, restarted: bool
) -> None:
    """The model writes ordinary tokens; the template renders control tokens."""
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
    # The next turn reuses the whole second turn.
    third = replayer.turn([*messages, second.message, user(QUESTIONS[2])], "Seven.", "s")
    assert third.n_reused == second.n_total
