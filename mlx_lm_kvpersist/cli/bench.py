"""`mlx-lm-kvpersist bench`: the plugin against the stock server on this machine, with any model.

Both servers get the same conversations: a new prompt, the next turn, and a turn after `kill -9`.
The speed of the stock server is measured first, and determines the length of the prompts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from ..api.admin import SPEC_PATH
from ..cache.geometry.precision import layout_in_words
from ..errors import ConfigError, KVPersistError
from ..host.http.request_checks import find_on_hub
from ..host.scheduling.model_provider import cannot_load, check_model_name, max_context
from ..units import show_bytes
from .machine import conditions, cpu_gflops, device, openblas_advice, versions
from .output import ongoing, utc_time
from .servers import Message, Reply, StartedServer, ask, document, temporary_folder

LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384)
"""Possible lengths of a new prompt, in tokens."""
COLD, HOT, RESTARTED = "new prompt", "next turn", "next turn after kill -9"
MODEL_FILES = ["*.json", "*.jsonl", "*.txt", "*.jinja", "*.py", "model*.safetensors"]
MODEL_FILES += ["tokenizer.model", "tiktoken.model", "*.tiktoken"]
"""The files of a model that mlx-lm downloads."""
_QUESTIONS = {
    COLD: "Who was the keeper of the lock?",
    HOT: "Tell the whole story again in your own words, at length.",
    RESTARTED: "How long is the chamber?",
}
_REPLY_TOKENS = {COLD: 16, HOT: 64, RESTARTED: 16}
_CONVERSATIONS = 3
_WORTH_REPEATING = 2048
_SLACK = 1.3
"""A factor for the planned time: long prompts are computed at fewer tokens a second."""
_SELF_TEST_S, _LONG_PROBE_S = 5.0, 0.5


@dataclass
class Side:
    """A server, its conversations, and its replies by state: COLD, HOT or RESTARTED."""

    name: str
    server: StartedServer
    replies: dict[str, list[Reply]] = field(default_factory=dict)
    messages: list[list[Message]] = field(default_factory=list)

    def converse(self, openings: Sequence[str]) -> None:
        for opening in openings:
            messages: list[Message] = []
            self.turn(messages, COLD, f"{opening}\n\n")
            self.turn(messages, HOT)
            self.messages.append(messages)

    def turn(self, messages: list[Message], state: str, before: str = "") -> None:
        """Send `before` and the state's question; add the reply to `messages`."""
        messages.append(_user(before + _QUESTIONS[state]))
        replies = self.replies.setdefault(state, [])
        with ongoing(f"{self.name}: {state}, {len(replies) + 1}"):
            replies.append(self.server.chat(messages, None, _REPLY_TOKENS[state]))
        messages.append({"role": "assistant", "content": replies[-1].text})


@dataclass(frozen=True)
class StockSpeed:
    """The stock server's speed on this machine, measured with a short prompt."""

    load_s: float
    prompt_tokens_per_s: float
    reply_tokens_per_s: float
    chars_per_token: float


def measured(model: str, folder: Path, minutes: float) -> dict[str, Any]:
    """Measure a model; return the results for JSON. The servers log into `folder`.

    Raises KVPersistError if a server fails or the time is too short.
    """
    started_s = time.monotonic()
    store = ("--kvpersist-dir", str(folder / "store"), "--kvpersist-min-free", "512M")
    options = ("--plugin", "kvpersist", *store)
    stock = _started("stock", model, folder)
    with stock.server:
        speed = _speed(stock.server)
        n_tokens, n_conversations = plan(model, speed, 60 * minutes, time.monotonic() - started_s)
        text = document(int((n_tokens - 32) * speed.chars_per_token))
        names = [f"Conversation {n} of {n_tokens}." for n in range(n_conversations)]
        openings = [f"{name}\n\n{text}" for name in names]
        stock.converse(openings)
        stock.server.kill9()
        ours = _started("kvpersist", model, folder, *options)
        with ours.server:
            spec = ask(ours.server.url, SPEC_PATH)
            with ongoing("kvpersist: warm up"):
                ours.server.chat([_user(f"Warm up.\n\n{text[:1000]}")], None, 1)
            ours.converse(openings)
            ours.server.wait_until_written()
            ours.server.kill9()
            for side in (stock, ours):
                with ongoing(f"{side.name}: started again after kill -9"):
                    side.server.start()
                for messages in side.messages:
                    side.turn(messages, RESTARTED)
                side.server.kill9()
    return {
        "seconds": round(time.monotonic() - started_s),
        "kv": spec,
        "setting": {
            "prompt_tokens": stock.replies[COLD][0].prompt_tokens,
            "conversations": n_conversations,
            "reply_tokens": _REPLY_TOKENS,
            "options": " ".join(options),
        },
        "rows": _rows(stock, ours),
    }


def _started(name: str, model: str, folder: Path, *options: str) -> Side:
    with ongoing(f"{name}: start"):
        return Side(name, StartedServer(model, *options, log_path=folder / f"{name}.log"))


def _speed(server: StartedServer) -> StockSpeed:
    with ongoing("stock: how fast is this machine"):
        for n_chars in (1000, 8000):
            prompt = f"{n_chars} characters.\n\n{document(n_chars)}"
            server.chat([_user(f"Warm up. {prompt}")], None, 1)
            reply = server.chat([_user(prompt)], None, 24)
            if reply.ttft_s > _LONG_PROBE_S:
                break
    n_computed = reply.prompt_tokens - reply.cached_tokens
    return StockSpeed(
        load_s=server.start_s,
        prompt_tokens_per_s=n_computed / reply.ttft_s,
        reply_tokens_per_s=reply.tokens_per_s or 10.0,
        chars_per_token=n_chars / reply.prompt_tokens,
    )


def plan(model: str, speed: StockSpeed, limit_s: float, spent_s: float) -> tuple[int, int]:
    """Return the number of tokens of each prompt, and the number of conversations.

    Raises KVPersistError if no run fits into `limit_s`, of which `spent_s` have passed.
    """
    room = max_context(model, None) or LENGTHS[-1]
    lengths = [n for n in LENGTHS if n + 512 <= room]
    reply_s = 2 * sum(_REPLY_TOKENS.values()) / speed.reply_tokens_per_s
    spent_s += 3 * speed.load_s + 2 * _SELF_TEST_S  # three more starts, two with self-tests

    def needed_s(n_tokens: int, n_conversations: int) -> float:
        # Stock computes a prompt again after `kill -9`. The plugin computes it once.
        prompts_s = 3 * _SLACK * n_tokens / speed.prompt_tokens_per_s
        return spent_s + n_conversations * (prompts_s + reply_s)

    fitting = [(n, k) for n in lengths for k in (_CONVERSATIONS, 1) if needed_s(n, k) <= limit_s]
    if not fitting:
        minutes = needed_s(LENGTHS[0], 1) / 60
        slow = f"; {advice}" if (advice := openblas_advice(cpu_gflops())) else ""
        raise KVPersistError(
            f"this machine computes {speed.prompt_tokens_per_s:.3g} tokens of a prompt a "
            f"second and loads the model in {speed.load_s:.0f} s; "
            f"give --minutes {minutes + 1:.0f}, or a smaller model{slow}"
        )
    # Prefer longer prompts up to 2,048 tokens, then more conversations, then longer prompts.
    return max(fitting, key=lambda plan: (min(plan[0], _WORTH_REPEATING), plan[1], plan[0]))


def _rows(*sides: Side) -> list[dict[str, Any]]:
    """Return the table's rows; if "times_as_fast" is above 1, the plugin is faster."""
    rows = []
    for state in _QUESTIONS:
        replies = [side.replies[state] for side in sides]
        seconds = ([reply.ttft_s for reply in of_side] for of_side in replies)
        reused = [statistics.median(r.cached_tokens for r in of_side) for of_side in replies]
        rows.append(row(f"first token, {state}", "s", *seconds, reused=reused))
    rates = [[r for reply in side.replies[HOT] if (r := reply.tokens_per_s)] for side in sides]
    if all(rates):
        rows.append(row("reply", "tokens/s", *rates, more_is_better=True))
    rows.append(row("start after kill -9", "s", *([side.server.start_s] for side in sides)))
    return rows


def run(args: argparse.Namespace) -> int:
    if not args.minutes >= 1:  # this also refuses nan
        raise ConfigError(f"--minutes {args.minutes:g} is too short; give 1 or more")
    if args.json and not args.json.absolute().parent.is_dir():
        raise ConfigError(f"there is no folder for {args.json}; make it first")
    if args.json and args.json.is_dir():
        raise ConfigError(f"--json {args.json} is a folder; name a file in it")
    path = fetched(args.model)
    conditions_of_run = measured_conditions(args.model, path)
    with temporary_folder("kvpersist-bench-") as folder:
        content = {**conditions_of_run, **measured(str(path), folder, args.minutes)}
    print(as_markdown(content))  # first: the file may not be writable
    if args.json:
        args.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return 0


def measured_conditions(name: str, path: Path) -> dict[str, Any]:
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    n_bytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    return {
        "date": utc_time(time.time()),
        "versions": versions(),
        "device": device(),
        "load_before": round(os.getloadavg()[0], 2),
        "cpu_gflops": cpu_gflops(),
        "model": {
            "name": name,
            "type": config.get("model_type"),
            "weights": show_bytes(n_bytes),
            "weight_bits": (config.get("quantization") or {}).get("bits"),
        },
    }


def fetched(model: str) -> Path:
    """Return a model's folder; download it as the server would. Raises ConfigError."""
    check_model_name(model)
    if Path(model).exists():
        return Path(model)
    try:
        find_on_hub(model)
        return Path(snapshot_download(model, allow_patterns=MODEL_FILES))
    except Exception as error:  # the hub raises exceptions of many classes
        raise cannot_load(model, error) from error


def row(
    what: str,
    unit: str,
    stock: Sequence[float],
    ours: Sequence[float],
    *,
    reused: Sequence[float] | None = None,
    more_is_better: bool = False,
) -> dict[str, Any]:
    """Return a row of medians. reused: tokens that the stock server and the plugin reused."""
    pairs = [(b, a) if more_is_better else (a, b) for a, b in zip(stock, ours, strict=False)]
    return {
        "what": what,
        "unit": unit,
        "stock": statistics.median(stock),
        "kvpersist": statistics.median(ours),
        "times_as_fast": statistics.median(over / under for over, under in pairs),
        "reused": dict(zip(("stock", "kvpersist"), reused, strict=True)) if reused else None,
        "samples": {"stock": list(stock), "kvpersist": list(ours)},
    }


def as_markdown(content: Mapping[str, Any]) -> str:
    """Return the results with their conditions, to paste into an issue."""
    kv, setting = content["kv"], content["setting"]
    precision = layout_in_words(kv["layout"]) if kv.get("kept") else ""
    precision = precision or f"nothing is kept ({kv['why_not']})"
    versions, machine, model = conditions(content)
    lines = [
        versions,
        machine,
        f"{model}; precision of kvpersist: {precision}",
        f"prompts of {setting['prompt_tokens']:,} tokens, {setting['conversations']} of each; one "
        "request and one server at a time; the system's page cache was not dropped",
        "",
        "| | stock | kvpersist | times as fast | kvpersist reused |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    for measured in content["rows"]:
        reused = f"{measured['reused']['kvpersist']:,.0f} tokens" if measured["reused"] else ""
        cells = [
            measured["what"],
            *(f"{measured[side]:.3g} {measured['unit']}" for side in ("stock", "kvpersist")),
            f"{measured['times_as_fast']:.3g}",
            reused,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", f"{content['date']}, took {content['seconds']} s"]
    return "\n".join(lines)


def _user(content: str) -> Message:
    return {"role": "user", "content": content}
