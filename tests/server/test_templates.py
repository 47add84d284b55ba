"""Prompts without a chat template, and from a template with arguments."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.support import Message, StartServer, make_tiny_model, synthetic_text

LONG = synthetic_text(200, seed=3)


def test_prompts_from_a_role_mapping_are_reused(
    start_server: StartServer, tiny_model: Path, models_dir: Path
) -> None:
    model = models_dir / "no-template"
    shutil.copytree(tiny_model, model)
    (model / "chat_template.jinja").unlink()
    server = start_server.with_plugin(model)
    roles = {"system": "S: ", "user": "U: ", "assistant": "A: ", "stop": "\n"}
    talk: list[Message] = [{"role": "user", "content": LONG}]
    before = 0
    for turn in range(3):
        reply = server.chat(talk, "s", role_mapping=roles, max_tokens=12)
        # "A: " is stripped at the end of a prompt, so a turn diverges right after the last "A:".
        assert reply.cached_tokens >= before
        before = reply.prompt_tokens - 2
        talk += [
            {"role": "assistant", "content": reply.text},
            {"role": "user", "content": f"{turn}?"},
        ]
    assert "could not be looked up" not in server.log


def test_prompts_with_other_template_arguments_are_not_reused(
    start_server: StartServer, models_dir: Path
) -> None:
    template = (
        "{%- for m in messages %}<|im_start|>{{ m.role }}\n"
        "{%- if mood %}[{{ mood }}]{% endif %}{{ m.content }}<|im_end|>{% endfor %}"
        "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    model = make_tiny_model(models_dir / "moody", chat_template=template)
    server = start_server.with_plugin(model, "--chat-template-args", '{"mood": "calm"}')
    talk: list[Message] = [{"role": "user", "content": LONG}]
    calm = server.chat(talk)
    wild = server.chat(talk, chat_template_kwargs={"mood": "wild"})
    assert wild.cached_tokens < 10 < calm.prompt_tokens
    for mood, first in ({"mood": "calm"}, calm), ({"mood": "wild"}, wild):
        again = server.chat(talk, chat_template_kwargs=mood)
        assert again.cached_tokens == again.prompt_tokens - 1
        assert again.text == first.text
