"""A server whose replies a test writes: tiny models with random weights call no tools.

Everything else is the server's own: its prompts, its caches, its decoding steps. The model computes
its logits, and the sampler ignores them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .server_process import ServerProcess
from .servers import StartServer
from .synthetic import make_tiny_model

LAUNCHER = '''
import json, os, sys
from pathlib import Path

import mlx.core as mx
import mlx_lm.server as stock

SCRIPT = Path(os.environ["SCRIPTED_REPLIES"])
make_sampler = stock._make_sampler


def scripted(args, tokenizer):
    """Say the next line of the script, from its first token to the end of the turn."""
    lines = SCRIPT.read_text().splitlines() if SCRIPT.exists() else []
    if not lines:
        return make_sampler(args, tokenizer)
    SCRIPT.write_text("\\n".join(lines[1:]))
    ids = tokenizer.encode(json.loads(lines[0]), add_special_tokens=False)
    rest = iter([*ids, *[tokenizer.eos_token_id] * 1000])
    return lambda logprobs: mx.array([next(rest)])


stock._make_sampler = scripted
from mlx_lm_kvpersist._startup import serve

serve(sys.argv[1:])
'''

TEMPLATE = (
    "{%- if tools %}<|im_start|>system\n# Tools\n<tools>\n"
    "{%- for tool in tools %}{{ tool | tojson }}\n{%- endfor %}</tools><|im_end|>\n{%- endif %}"
    "{%- for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\n' }}"
    "{%- if message.reasoning_content %}"
    "{{ '<think>\n' + message.reasoning_content.strip('\n') + '\n</think>\n\n' }}"
    "{%- endif %}"
    "{{ message.content or '' }}"
    "{%- for tool_call in message.tool_calls or [] %}"
    "{%- set tool_call = tool_call.function %}"
    "{%- if message.content or not loop.first %}{{ '\n' }}{%- endif %}"
    '{{ "<tool_call>\n" }}{"name": "{{ tool_call.name }}", '
    '"arguments": {{ tool_call.arguments | tojson }}}{{ "\n</tool_call>" }}'
    "{%- endfor %}"
    "{{ '<|im_end|>\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{%- if enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{%- endif %}"
    "{%- endif %}"
)
"""Tools and thinking in the form of Qwen3's template; thinking is always rendered again."""


def make_thinking_model(path: Path, **options: Any) -> Path:
    """Write a tiny model with tools and thinking; see `make_tiny_model`."""
    options = {
        "chat_template": TEMPLATE,
        "extra_special_tokens": ("<think>", "</think>"),
        **options,
    }
    return make_tiny_model(path, **options)


def call(name: str, **arguments: Any) -> str:
    """Return what a model writes to call a tool."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class ScriptedServer:
    """A server with the plugin that says the given replies, and after them what it samples."""

    def __init__(self, start: StartServer, model: Path, folder: Path, *options: str) -> None:
        self._script = folder / "script.jsonl"
        launcher = folder / "scripted.py"
        launcher.write_text(LAUNCHER, encoding="utf-8")
        env = {"SCRIPTED_REPLIES": str(self._script)}
        # A scripted reply has one token a step.
        self.process: ServerProcess = start.with_plugin(
            model, "--kvpersist-draft", "off", *options, launcher=(str(launcher),), env=env
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.process.port}"

    def say(self, *replies: str) -> None:
        self._script.write_text("\n".join(json.dumps(each) for each in replies), encoding="utf-8")
