"""Roles that a chat template refuses: the message reaches the model all the same, in its place."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import load

from mlx_lm_kvpersist.api.normalise import share_reasoning
from mlx_lm_kvpersist.host.history import Template
from tests.support import Message, make_tiny_model

GENERIC = (
    "{%- for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FIRST_ONLY = (
    "{%- for m in messages %}{%- if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{%- endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
)
"""As in Qwen3.5's."""
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
"""As in Mistral's: a user may not speak behind a tool's result."""
NO_SYSTEM = FIRST_ONLY.replace(" and not loop.first", "")
"""As in Gemma 2's."""
SILENT = (
    "{%- for m in messages %}{%- if m.role in ('user', 'assistant', 'tool') or loop.first %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{%- endif %}{% endfor %}"
)
HOISTING = (
    "{%- for m in messages %}{%- if m.role == 'system' %}{{ m.content }}{%- endif %}{% endfor %}"
    "{%- for m in messages %}{%- if m.role != 'system' %}[{{ m.role }}]{{ m.content }}"
    "{%- endif %}{% endfor %}"
)
"""As in DeepSeek's: each new system message changes the whole prompt."""
TEMPLATES = {
    "generic": GENERIC,
    "first-only": FIRST_ONLY,
    "alternating": ALTERNATING,
    "no-system": NO_SYSTEM,
    "silent": SILENT,
    "hoisting": HOISTING,
}
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": {}}}


def message(role: str, content: Any, **more: Any) -> Message:
    return {"role": role, "content": content, **more}


TALK: list[Message] = [
    message("developer", "<0>"),
    message("developer", "<1>"),
    message("user", "<2>"),
    message("system", "<3>"),
    message("assistant", "<4>", tool_calls=[CALL]),
    message("tool", "<5>", tool_call_id="1"),
    message("user", [{"type": "text", "text": "<6>"}]),
    message("assistant", "<7>"),
    message("system", [{"type": "text", "text": "<8>"}]),
    message("user", "<9>"),
]


@pytest.fixture(scope="module")
def tokenizers(models_dir: Path) -> dict[str, Any]:
    path = make_tiny_model(models_dir / "roles")
    return {name: load(path, {"chat_template": source}) for name, source in TEMPLATES.items()}


def rendered(tokenizer: Any, roles: TemplateRoles, talk: list[Message]) -> str:
    talk = copy.deepcopy(talk)
    roles.fit(talk)
    for each in talk:
        if isinstance(each["content"], list):
            each["content"] = "".join(part["text"] for part in each["content"])
    return str(tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=False))


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_message_reaches_the_model_in_its_place(
    tokenizers: dict[str, Any], name: str
) -> None:
    """And the prompt only grows: no turn changes what an earlier one rendered."""
    tokenizer = tokenizers[name]
    roles = TemplateRoles.of(tokenizer)
    text = rendered(tokenizer, roles, TALK)
    places = [text.find(f"<{n}>") for n in range(len(TALK))]
    assert -1 not in places and places == sorted(places), text
    for n_sent in (4, 7):  # those before a reply
        assert text.startswith(rendered(tokenizer, roles, TALK[:n_sent]))


def test_a_template_that_renders_all_is_left_alone(tokenizers: dict[str, Any]) -> None:
    roles = TemplateRoles.of(tokenizers["generic"])
    talk = copy.deepcopy(TALK)
    roles.fit(talk)
    assert talk[2:] == TALK[2:]
    assert [each["role"] for each in talk[:2]] == ["system", "system"]
    assert roles.refused == frozenset()


def test_a_reminder_reads_as_one(tokenizers: dict[str, Any]) -> None:
    roles = TemplateRoles.of(tokenizers["first-only"])
    talk = [message("user", "Hi."), message("system", "Be kind.")]
    roles.fit(talk)
    reminder = "<system-reminder>\nBe kind.\n</system-reminder>"
    assert talk == [message("user", f"Hi.\n\n{reminder}")]


def test_a_template_that_knows_developers_gets_them(models_dir: Path) -> None:
    source = GENERIC.replace("{%- for", "{#- developer or system #}{%- for", 1)
    tokenizer = load(make_tiny_model(models_dir / "developer"), {"chat_template": source})
    talk = copy.deepcopy(TALK[:3])
    TemplateRoles.of(tokenizer).fit(talk)
    assert talk == TALK[:3]


def test_reasoning_comes_back_under_either_name() -> None:
    talk = [
        message("assistant", "a", reasoning="one"),
        message("assistant", "b", reasoning_content="two"),
        message("assistant", "c", reasoning="three", reasoning_content="other"),
        message("user", "d"),
    ]
    share_reasoning(talk)
    assert [(m.get("reasoning"), m.get("reasoning_content")) for m in talk] == [
        ("one", "one"),
        ("two", "two"),
        ("three", "other"),
        (None, None),
    ]
