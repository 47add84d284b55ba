"""A conversation that a template refuses is adapted, and its messages keep their order."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import load

from mlx_lm_kvpersist.errors import RequestRefused
from mlx_lm_kvpersist.host.history import NO_RESULT
from tests.support import Message, make_tiny_model
from tests.support.histories import (
    CLAUDE,
    HISTORIES,
    TWO,
    answer,
    as_messages,
    as_responses,
    call,
    calls,
    result,
    system,
    user,
    with_call,
)
from tests.support.rendering import Renderer
from tests.support.templates import OTHERS, SHAPES

GENERIC = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FIRST_ONLY = (
    "{%- for m in messages %}{%- if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{%- endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)
"""Like Qwen3.5's."""
ALTERNATING = (
    "{%- if messages[0].role == 'system' %}{%- set rest = messages[1:] %}"
    "[SYS]{{ messages[0].content }}[/SYS]{%- else %}{%- set rest = messages %}{%- endif %}"
    "{%- set ns = namespace(n=0) %}{%- for m in rest %}"
    "{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}"
    "{%- if (m.role == 'user') != (ns.n % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{%- endif %}{%- set ns.n = ns.n + 1 %}"
    "{%- elif m.role not in ('assistant', 'tool') %}{{ raise_exception('only known roles') }}"
    "{%- endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
"""Like Mistral's: a user message may not follow a tool's result."""
NO_SYSTEM = FIRST_ONLY.replace(" and not loop.first", "")
"""Like Gemma 2's."""
SILENT = (
    "{%- for m in messages %}{%- if m.role in ('user', 'assistant', 'tool') or loop.first %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{%- endif %}{% endfor %}"
)
HOISTING = (
    "{%- for m in messages %}{%- if m.role == 'system' %}{{ m.content }}{%- endif %}{% endfor %}"
    "{%- for m in messages %}{%- if m.role != 'system' %}[{{ m.role }}]{{ m.content }}"
    "{%- endif %}{% endfor %}"
)
"""Like DeepSeek's: each new system message changes the whole prompt."""
ROLES = {
    "generic": GENERIC,
    "first-only": FIRST_ONLY,
    "alternating": ALTERNATING,
    "no-system": NO_SYSTEM,
    "silent": SILENT,
    "hoisting": HOISTING,
}
TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
}
CONVERSATION: list[Message] = [
    {"role": "developer", "content": "<0>"},
    {"role": "developer", "content": "<1>"},
    user("<2>"),
    system("<3>"),
    calls(call("{}", "1"), content="<4>"),
    result("<5>", "1"),
    user([{"type": "text", "text": "<6>"}]),
    answer("<7>"),
    system([{"type": "text", "text": "<8>"}]),
    user("<9>"),
]
DROPPED = {
    "llama3": {"<t1>"},  # text next to a call
    "mistral": {"<t1>"},
    "gemma": {"<c1>", "<c2>", "<s1>"},  # calls without results, a lone system message
    "harmony": {"<c2>"},  # all calls of a message except the first
}
"""Texts that a template omits, also in stock."""
RENDERED_AT_FIRST = (
    ("gemma", "a system between a call and its result"),
    ("gemma", "a user between a call and its result"),
)
"""Conversations that are adapted later, although the template accepts their beginning."""


@pytest.fixture(scope="module")
def renderers(models_dir: Path) -> dict[str, Renderer]:
    path = make_tiny_model(models_dir / "histories")
    sources = {**SHAPES, **OTHERS, **ROLES}
    made = {name: load(path, {"chat_template": source}) for name, source in sources.items()}
    return {name: Renderer(tokenizer) for name, tokenizer in made.items()}


def chat_body(history: list[Message], *tools: Any) -> dict[str, Any]:
    return {"messages": history, **({"tools": list(tools)} if tools else {})}


def marks(value: Any) -> list[str]:
    """Return the texts that the model must see."""
    return re.findall(r"<[a-z][0-9]>", json.dumps(value))


def has_late_system(messages: list[Message]) -> bool:
    """Return whether any message after the first is a system message."""
    return any(message["role"] == "system" for message in messages[1:])


# The text that the model reads.


@pytest.mark.parametrize("shape", [*SHAPES, *OTHERS])
@pytest.mark.parametrize("tools", [(), (TOOL,)], ids=["no tools", "tools"])
def test_chat_is_rendered_as_in_stock_or_adapted(
    renderers: dict[str, Renderer], shape: str, tools: tuple[Any, ...]
) -> None:
    renderer = renderers[shape]
    for name, history in HISTORIES.items():
        body = chat_body(history, *tools)
        stock = renderer.stock(body)
        ours = renderer.prompt(body).ids
        if stock is not None and not (shape == "harmony" and has_late_system(body["messages"])):
            assert list(ours) == stock, name
            continue
        text = renderer.tokenizer.decode(list(ours))
        missing = {mark for mark in marks(history) if mark not in text}
        if shape == "harmony":
            missing -= DROPPED[shape]
        # Templates need not render thoughts, or text next to a call.
        assert missing <= {"<h1>", "<t1>"}, (name, text)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("api", "form"), [("messages", as_messages), ("responses", as_responses)])
def test_messages_and_responses_apis_keep_the_texts_of_conversations(
    renderers: dict[str, Renderer], shape: str, api: str, form: Any
) -> None:
    for name, history in HISTORIES.items():
        body = form(history)
        text = renderers[shape].text(body, api)
        missing = {mark for mark in marks(body) if mark not in text}
        if name in ("a call and an answer", "an answer and a call"):
            missing -= {"<a1>"}  # a turn becomes one message, with text next to a call
        # Older thoughts may be left out.
        assert missing <= {*DROPPED.get(shape, ()), "<h1>"}, (name, text)


@pytest.mark.parametrize("shape", [*SHAPES, *OTHERS])
def test_each_answered_prompt_is_a_prefix_of_the_next(
    renderers: dict[str, Renderer], shape: str
) -> None:
    """Each answered prompt, up to the answer, is the beginning of the next prompt."""
    renderer = renderers[shape]
    for name, talk in HISTORIES.items():
        if (shape, name) in RENDERED_AT_FIRST:
            continue
        ends = [n for n in range(1, len(talk)) if talk[n]["role"] == "assistant"]
        ends = [n for n in ends if talk[n - 1]["role"] in ("user", "tool")]
        texts = [renderer.text(chat_body(talk[:n])) for n in [*ends, len(talk)]]
        for before, after in pairwise(texts):
            begun = re.sub(r"<\|(im_start|start)\|>(assistant|model)\n*$", "", before)
            assert after.startswith(begun), (name, begun, after)


ROLE = st.sampled_from(("system", "user", "assistant"))
TEXT = st.text("ab <|>\n\u00e9\U0001f600", min_size=1, max_size=6)
PARTS = st.lists(TEXT, max_size=3).map(
    lambda texts: [{"type": "text", "text": text} for text in texts]
)


@st.composite
def conversations(draw: st.DrawFn) -> list[Message]:
    """Return messages of all kinds, in any order."""
    made: list[Message] = []
    for _ in range(draw(st.integers(1, 7))):
        kind = draw(st.sampled_from(("role", "calls", "tool")))
        call_id = draw(st.sampled_from(("abcdef123", "x", CLAUDE)))
        if kind == "role":
            made.append({"role": draw(ROLE), "content": draw(TEXT | PARTS | st.none())})
        elif kind == "calls":
            given = draw(st.sampled_from(("{}", '{"a": "b"}', "", "[1]", "{", None)))
            made.append(calls(call(given, call_id), content=draw(TEXT | st.none())))
        else:
            made.append(result(draw(TEXT), call_id))
    return made


@settings(max_examples=300, deadline=None)
@given(messages=conversations(), shape=st.sampled_from([*SHAPES, *OTHERS]), has_tools=st.booleans())
def test_prompt_equals_stocks_if_stock_can_render_it(
    renderers: dict[str, Renderer], messages: list[Message], shape: str, has_tools: bool
) -> None:
    body = chat_body(messages, *[TOOL] * has_tools)
    stock = renderers[shape].stock(body)
    # Harmony's template moves a late system message; Gemma's counts it as the assistant's.
    if stock is not None and not (shape in ("harmony", "gemma") and has_late_system(messages)):
        assert list(renderers[shape].prompt(body).ids) == stock
        return
    try:
        assert renderers[shape].prompt(body).ids
    except RequestRefused as error:
        assert re.search(r"messages\[\d\] cannot be rendered", str(error)), error


# Roles.


@pytest.mark.parametrize("name", ROLES)
def test_messages_of_every_role_keep_their_order(renderers: dict[str, Renderer], name: str) -> None:
    """A new turn does not change the text of earlier turns."""
    text = renderers[name].text(chat_body(CONVERSATION))
    places = [text.find(f"<{n}>") for n in range(len(CONVERSATION))]
    assert -1 not in places and places == sorted(places), text
    for n_sent in (4, 7):  # messages before a reply
        before = renderers[name].text(chat_body(CONVERSATION[:n_sent]))
        assert text.startswith(before.removesuffix("<|im_start|>assistant\n"))


def test_late_system_message_becomes_a_reminder_in_the_user_message(
    renderers: dict[str, Renderer],
) -> None:
    text = renderers["first-only"].text(chat_body([user("Hi."), system("Be kind.")]))
    assert "user\nHi.\n\n<system-reminder>\nBe kind.\n</system-reminder><|im_end|>" in text


def test_developer_role_is_kept_if_the_template_knows_it(models_dir: Path) -> None:
    source = GENERIC.replace("{%- for", "{#- developer or system #}{%- for", 1)
    tokenizer = load(make_tiny_model(models_dir / "developer"), {"chat_template": source})
    assert (
        Renderer(tokenizer)
        .text(chat_body(CONVERSATION[:3]))
        .startswith("<|im_start|>developer\n<0>")
    )


# Calls.


def test_call_ids_are_unique_and_stable_across_turns(
    renderers: dict[str, Renderer],
) -> None:
    talk = HISTORIES["two calls"]
    text = renderers["mistral"].text(chat_body(talk))
    ids = re.findall(r'"(?:id|call_id)": "([A-Za-z0-9]{9})"', text)
    assert ids[:2] == ids[2:] and len(set(ids)) == 2
    assert ids[0] in renderers["mistral"].text(chat_body(talk[:3]))
    kept = renderers["mistral"].text(chat_body(HISTORIES["an id of nine"]))
    assert kept.count("abcDEF123") == 2


@pytest.mark.parametrize(
    ("shape", "arguments", "shown"),
    [
        ("chatml", '{"path": "<c1>', json.dumps('{"path": "<c1>')),
        ("llama3", '{"path": "<c1>', json.dumps('{"path": "<c1>')),
        ("qwen-coder", '{"path": "<c1>', '<parameter=arguments>\n{"path": "<c1>\n</parameter>'),
        ("qwen-coder", '["<c1>"]', "<parameter=arguments>\n['<c1>']\n</parameter>"),
        ("qwen-coder", "", "<function=look>\n</function>"),
        ("qwen-coder", None, "<function=look>\n</function>"),
        ("strings", '{"where": "<c1>"}', '"arguments": {"where": "<c1>"}}'),
        ("strings", '{"path": "<c1>', '"arguments": {"path": "<c1>}'),
        ("gemma", '{"where": "<c1>"}', '{"name": "look", "arguments": {"where": "<c1>"}}'),
    ],
)
def test_arguments_are_rendered_in_the_templates_form(
    renderers: dict[str, Renderer], shape: str, arguments: Any, shown: str
) -> None:
    text = renderers[shape].text(chat_body(with_call(call(arguments))))
    assert shown in text.replace("\n\n", "\n").replace("look><", "look>\n<"), text


def test_parallel_calls_are_separated_if_the_template_allows_one(
    renderers: dict[str, Renderer],
) -> None:
    for name in ("two calls", "two calls, results reversed"):
        text = renderers["llama3"].text(chat_body(HISTORIES[name]))
        order = [text.index(mark) for mark in ("<c1>", "<r1>", "<c2>", "<r2>")]
        assert order == sorted(order) or order[2:] + order[:2] == sorted(order), text
    half = renderers["llama3"].text(chat_body([user(), calls(*TWO), result("<r2>", "x2")]))
    assert half.index("<c2>") < half.index("<r2>") < half.index("<c1>")


def test_call_without_result_gets_one_if_the_template_requires_it(
    renderers: dict[str, Renderer],
) -> None:
    history = chat_body(HISTORIES["a call without a result"])
    assert NO_RESULT in renderers["mistral"].text(history)
    assert NO_RESULT not in renderers["chatml"].text(history)


# The template in use.


def test_named_templates_are_examined_separately(models_dir: Path) -> None:
    """A tokenizer can have another template for requests with tools."""
    tokenizer = load(make_tiny_model(models_dir / "named"))
    tokenizer.chat_template = {"default": SHAPES["chatml"], "tool_use": SHAPES["mistral"]}
    renderer = Renderer(tokenizer)
    history = with_call(call())
    assert CLAUDE not in renderer.text(chat_body(history, TOOL))
    assert list(renderer.prompt(chat_body(history)).ids) == renderer.stock(chat_body(history))
    own = {"chat_template": SHAPES["gemma"]}
    text = renderer.text({**chat_body(history), "chat_template_kwargs": own})
    assert text.startswith("<|im_start|>user\n<u1><|im_end|><|im_start|>model\n<tool_call>")


def test_template_is_examined_only_once(models_dir: Path) -> None:
    tokenizer = load(make_tiny_model(models_dir / "asked"), {"chat_template": SHAPES["mistral"]})
    renderer = Renderer(tokenizer)
    history = chat_body(HISTORIES["a user behind a result"])
    renderer.prompt(history)
    n_renders = [0]
    render = tokenizer._tokenizer.apply_chat_template

    def counted(*args: Any, **kwargs: Any) -> Any:
        n_renders[0] += 1
        return render(*args, **kwargs)

    tokenizer._tokenizer.apply_chat_template = counted
    renderer.prompt(history)
    assert n_renders[0] == 2  # the original conversation, which is refused, and the adapted one


def test_developer_role_depends_on_the_named_template_in_use(
    models_dir: Path,
) -> None:
    tokenizer = load(make_tiny_model(models_dir / "named developers"))
    tokenizer.chat_template = {"default": GENERIC, "tool_use": "{#- developer #}" + GENERIC}
    renderer = Renderer(tokenizer)
    assert renderer.text(chat_body(CONVERSATION[:3])).startswith("<|im_start|>system\n<0>")
    assert renderer.text(chat_body(CONVERSATION[:3], TOOL)).startswith("<|im_start|>developer\n<0>")


# Refused conversations.

CHANNEL = "<|channel|>analysis"


@pytest.mark.parametrize(
    ("api", "form", "place"),
    [
        ("chat", chat_body, "messages[3]"),
        ("messages", as_messages, "messages[3]"),
        ("responses", as_responses, "input[3]"),
    ],
)
def test_refusal_names_the_message_that_cannot_be_rendered(
    renderers: dict[str, Renderer], api: str, form: Any, place: str
) -> None:
    history = [user(), user("<u2>"), user("<u3>"), answer(CHANNEL), user("<u4>")]
    with pytest.raises(RequestRefused) as refused:
        renderers["harmony"].prompt(form(history), api)
    assert f"; {place} cannot be rendered (change it, or leave it out)" in str(refused.value)


@pytest.mark.parametrize("role", [{}, {"role": None}])
def test_refusal_names_the_message_without_a_role(
    renderers: dict[str, Renderer], role: dict[str, Any]
) -> None:
    with pytest.raises(RequestRefused, match=re.escape("messages[1].role is null")):
        renderers["chatml"].prompt(chat_body([user(), {"content": "<a1>", **role}]))


def test_refusal_of_template_arguments_names_no_message(renderers: dict[str, Renderer]) -> None:
    for arguments in ({"chat_template": "{{ raise_exception('never') }}"}, {"tokenize": True}):
        with pytest.raises(RequestRefused) as refused:
            renderers["chatml"].prompt({**chat_body([user()]), "chat_template_kwargs": arguments})
        assert "messages[" not in str(refused.value)


# Continued messages.


@pytest.mark.parametrize("shape", [*SHAPES, *OTHERS])
@pytest.mark.parametrize("api", ["chat", "messages"])
def test_final_assistant_message_is_left_open_if_it_is_continued(
    renderers: dict[str, Renderer], shape: str, api: str
) -> None:
    begun = [*HISTORIES["a user behind a result"], answer("The answer is")]
    body = as_messages(begun) if api == "messages" else chat_body(begun)
    options = {"continue_final_message": True} if api == "chat" else {}
    text = renderers[shape].text({**body, **options}, api)
    assert text.endswith("The answer is")
    assert "<u3>" in text


def test_empty_final_assistant_message_starts_a_new_reply(renderers: dict[str, Renderer]) -> None:
    new_reply = renderers["llama3"].prompt(chat_body([user()])).ids
    begun = [user(), answer("")]
    assert renderers["llama3"].prompt(as_messages(begun), "messages").ids == new_reply
    body = {**chat_body(begun), "continue_final_message": True}
    assert renderers["llama3"].prompt(body).ids == new_reply


@pytest.mark.parametrize(
    ("history", "expected_message"),
    [
        ([user(), answer("It is ")], "messages[1].content: final assistant content cannot end"),
        (
            [user()],
            "continue_final_message is true, expected an assistant's text as the last message",
        ),
        (
            [user(), calls()],
            "continue_final_message is true, expected an assistant's text as the last message",
        ),
    ],
)
def test_refusal_says_why_the_final_message_cannot_be_continued(
    renderers: dict[str, Renderer], history: list[Message], expected_message: str
) -> None:
    with pytest.raises(RequestRefused, match=re.escape(expected_message)):
        renderers["chatml"].prompt({**chat_body(history), "continue_final_message": True})
