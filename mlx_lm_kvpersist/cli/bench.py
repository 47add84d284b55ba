"""`mlx-lm-kvpersist bench`: the plugin against the stock server on this machine, with any model.

Two servers take turns, so that the model is in memory once: stock, ours, and after `kill -9` both
again. Each is asked the same conversations: a new prompt, the next turn, and after the restart one
turn more. The length of the prompts follows from a rate that is measured first, so that the whole
fits into the time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ..api.admin import SPEC_PATH
from ..errors import ConfigError, KVPersistError
from ..host.scheduling.context_length import max_context
from ..host.scheduling.model_provider import check_model_name
from ..units import show_bytes
from .asking import ask
from .bench_report import as_markdown, row
from .machine import cpu_gflops, device, openblas_advice, versions
from .output import ongoing
from .started_server import Message, Reply, StartedServer, wait_until_written
from .story import document

LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384)
"""Tokens that a new prompt may have."""
COLD, HOT, RESTARTED = "new prompt", "next turn", "next turn after kill -9"
_QUESTIONS = {
    COLD: "Who was the keeper of the lock?",
    HOT: "Tell the whole story again in your own words, at length.",
    RESTARTED: "How long is the chamber?",
}
_REPLY_TOKENS = {COLD: 16, HOT: 64, RESTARTED: 16}
_CONVERSATIONS = 3
_WORTH_REPEATING = 2048
"""Below so many tokens one conversation of longer prompts says more than three."""
_SLACK = 1.3
"""A long prompt computes fewer tokens a second than the short one that the rate was measured on."""
_SELF_TEST_S = 5.0
_LONG_PROBE_S = 0.5
"""A prompt that took longer says enough about the machine."""
_MEASURE_SHARE = 5
"""Measuring the precision may take this part of the time, at most the default."""


@dataclass
class Side:
    """One server's results: seconds of each start to the first token, replies by state."""

    options: tuple[str, ...]
    starts_s: list[float] = field(default_factory=list)
    replies: dict[str, list[Reply]] = field(default_factory=dict)
    messages: list[list[Message]] = field(default_factory=list)


@dataclass(frozen=True)
class StockSpeed:
    """The stock server's speed on this machine, measured with a short prompt."""

    load_s: float
    prompt_tokens_per_s: float
    reply_tokens_per_s: float
    chars_per_token: float


class Bench:
    """One run: the servers, the time it may take, and what was measured so far."""

    def __init__(self, model: str, folder: Path, minutes: float) -> None:
        self._model, self._folder = model, folder
        self._started_s, self._limit_s = time.monotonic(), 60 * minutes
        self.measure_s = min(60.0, self._limit_s / _MEASURE_SHARE)
        store = ("--kvpersist-dir", str(folder / "store"), "--kvpersist-min-free", "512M")
        plugin = ("--plugin", "kvpersist", *store)
        ours = (*plugin, "--kvpersist-kv-measure-s", str(int(self.measure_s)))
        self.stock, self.ours = Side(()), Side(ours)
        self.n_tokens = self._probe_chars = 0
        self._starts_s = self._chars_per_token = 0.0
        self.spec: dict[str, Any] = {}

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started_s

    def run(self) -> None:
        """Measure all. Raises KVPersistError where a server fails, or the time is too short."""
        with ExitStack() as stack:
            stock = stack.enter_context(self._server("stock", self.stock))
            speed = self._speed(stock)
            self._serve_stock(stock, self._plan(speed))
            stock.kill9()
            ours = stack.enter_context(self._server("kvpersist", self.ours))
            self.spec = ask(ours.url, SPEC_PATH)
            with ongoing("kvpersist: warm up"):
                ours.chat([_user(f"Warm up.\n\n{document(self._probe_chars)}")], None, 1)
            for n, messages in enumerate(self.stock.messages, 1):
                of = f"kvpersist, {n} of {len(self.stock.messages)}"
                self._converse(ours, self.ours, messages[0]["content"], of)
            wait_until_written(self._folder / "store")
            ours.kill9()
            for server, side, name in (
                (stock, self.stock, "stock"),
                (ours, self.ours, "kvpersist"),
            ):
                with ongoing(f"{name}: started again after kill -9"):
                    started_s = time.monotonic()
                    server.start()
                    side.starts_s.append(time.monotonic() - started_s)
                for n, messages in enumerate(side.messages, 1):
                    with ongoing(f"{name}: {RESTARTED}, {n} of {len(side.messages)}"):
                        self._turn(server, side, messages, RESTARTED)
                server.kill9()

    def _server(self, name: str, side: Side) -> StartedServer:
        what = f"{name}: start" if side is self.stock else f"{name}: start, precision measured once"
        with ongoing(what):
            started_s = time.monotonic()
            server = StartedServer(
                self._model, *side.options, log_path=self._folder / f"{name}.log"
            )
            side.starts_s.append(time.monotonic() - started_s)
        return server

    def _speed(self, server: StartedServer) -> StockSpeed:
        """Measure by about 250 tokens, and by about 2,000 where these took no time."""
        with ongoing("stock: how fast is this machine"):
            for n_chars in (1000, 8000):
                prompt = f"{n_chars} characters.\n\n{document(n_chars)}"
                server.chat([_user(f"Warm up. {prompt}")], None, 1)
                reply = server.chat([_user(prompt)], None, 24)
                if reply.ttft_s > _LONG_PROBE_S:
                    break
        self._probe_chars = n_chars
        n_computed = reply.prompt_tokens - reply.cached_tokens
        return StockSpeed(
            load_s=self.stock.starts_s[0],
            prompt_tokens_per_s=n_computed / reply.ttft_s,
            reply_tokens_per_s=reply.tokens_per_s or 10.0,
            chars_per_token=n_chars / reply.prompt_tokens,
        )

    def _plan(self, speed: StockSpeed) -> int:
        """Choose the length of the prompts; return how many conversations there are to be."""
        room = max_context(self._model, None) or LENGTHS[-1]
        lengths = [n for n in reversed(LENGTHS) if n + 512 <= room]
        reply_s = 2 * sum(_REPLY_TOKENS.values()) / speed.reply_tokens_per_s
        starts_s = 3 * speed.load_s + self.measure_s + 2 * _SELF_TEST_S
        left_s = self._limit_s - self.seconds - starts_s

        def needed_s(n_tokens: int, n_conversations: int) -> float:
            # Stock computes the prompt twice, ours once.
            prompts_s = 3 * _SLACK * n_tokens / speed.prompt_tokens_per_s
            return n_conversations * (prompts_s + reply_s)

        repeated = [n for n in lengths if needed_s(n, _CONVERSATIONS) <= left_s]
        single = [n for n in lengths if needed_s(n, 1) <= left_s]
        if not single:
            minutes = (self.seconds + starts_s + needed_s(LENGTHS[0], 1)) / 60
            slow = f"; {advice}" if (advice := openblas_advice(cpu_gflops())) else ""
            raise KVPersistError(
                f"this machine computes {speed.prompt_tokens_per_s:.3g} tokens of a prompt a "
                f"second and loads the model in {speed.load_s:.0f} s; "
                f"give --minutes {minutes + 1:.0f}, or a smaller model{slow}"
            )
        is_repeated = bool(repeated) and repeated[0] >= min(_WORTH_REPEATING, single[0])
        self._starts_s, self._chars_per_token = starts_s, speed.chars_per_token
        self.n_tokens = repeated[0] if is_repeated else single[0]
        return _CONVERSATIONS if is_repeated else 1

    def _serve_stock(self, server: StartedServer, n_conversations: int) -> None:
        """Hold conversations, fewer or shorter ones if the first takes longer than was thought."""
        while len(self.stock.messages) < n_conversations:
            began_s = self.seconds
            n = len(self.stock.messages) + 1
            text = document(int((self.n_tokens - 32) * self._chars_per_token))
            opening = f"Conversation {n} of {self.n_tokens}.\n\n{text}\n\n{_QUESTIONS[COLD]}"
            self._converse(server, self.stock, opening, f"stock, {n} of {n_conversations}")
            took_s = self.seconds - began_s
            # Ours and the restarts take at most as long.
            left_s = self._limit_s - self.seconds - self._starts_s
            shorter = [m for m in LENGTHS if m / self.n_tokens * 3 * took_s <= left_s]
            if n == 1 and left_s < 2 * took_s and self.n_tokens > LENGTHS[0]:
                self.n_tokens = max(m for m in (*shorter, LENGTHS[0]) if m < self.n_tokens)
                self.stock.messages.clear()
                self.stock.replies.clear()
                n_conversations = 1
            elif left_s < (2 * n + 3) * took_s:
                break

    def _converse(self, server: StartedServer, side: Side, opening: str, progress: str) -> None:
        messages = [_user(opening)]
        for state in (COLD, HOT):
            with ongoing(f"{progress}: {state}, about {self.n_tokens:,} tokens"):
                self._turn(server, side, messages, state)
        side.messages.append(messages)

    def _turn(self, server: StartedServer, side: Side, messages: list[Message], state: str) -> None:
        """Ask the state's question; the reply becomes part of the conversation."""
        if state != COLD:
            messages.append(_user(_QUESTIONS[state]))
        reply = server.chat(messages, None, _REPLY_TOKENS[state])
        side.replies.setdefault(state, []).append(reply)
        messages.append({"role": "assistant", "content": reply.text})

    def rows(self) -> list[dict[str, Any]]:
        """Return the table's rows; "times" above 1 is in our favour."""
        found, sides = [], (self.stock, self.ours)
        for state in (COLD, HOT, RESTARTED):
            samples = [[reply.ttft_s for reply in side.replies[state]] for side in sides]
            reused = [
                statistics.median(reply.cached_tokens for reply in side.replies[state])
                for side in sides
            ]
            found.append(row(f"first token, {state}", "s", *samples, reused=reused))
        rates = [
            [rate for reply in side.replies[HOT] if (rate := reply.tokens_per_s)] for side in sides
        ]
        if all(rates):
            found.append(row("reply", "tokens/s", *rates, more_is_better=True))
        found.append(row("start after kill -9", "s", *(side.starts_s[-1:] for side in sides)))
        return found


def run(args: argparse.Namespace) -> int:
    """Run the command, print the table and write the JSON; return the exit status."""
    if args.minutes < 1:
        raise ConfigError(f"--minutes {args.minutes:g} is too short; give 1 or more")
    if args.json and not args.json.absolute().parent.is_dir():
        raise ConfigError(f"there is no folder for {args.json}; make it first")
    check_model_name(args.model)
    path = _fetched(args.model)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="kvpersist-bench-") as folder_name:
        bench = Bench(str(path), Path(folder_name), args.minutes)
        bench.run()
        content = {
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "seconds": round(bench.seconds),
            "versions": versions(),
            "device": device(),
            "cpu_gflops": cpu_gflops(),
            "load_before": round(load, 2),
            "model": _model(args.model, path),
            "kv": bench.spec,
            "setting": {
                "prompt_tokens": bench.stock.replies[COLD][0].prompt_tokens,
                "conversations": len(bench.stock.messages),
                "reply_tokens": _REPLY_TOKENS,
                "options": " ".join(bench.ours.options),
            },
            "rows": bench.rows(),
        }
    if args.json:
        args.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    print(as_markdown(content))
    return 0


def _fetched(model: str) -> Path:
    """Return a model's folder; what is on the hub is downloaded now, as the server would."""
    if Path(model).exists():
        return Path(model)
    from mlx_lm.utils import _download

    try:
        return Path(_download(model))
    except Exception as error:
        # The hub raises exceptions of many classes.
        reason = " ".join(str(error).split())[:300] or repr(error)
        raise KVPersistError(f"the model {model} cannot be fetched: {reason}") from error


def _model(name: str, path: Path) -> dict[str, Any]:
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    n_bytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    quantization = config.get("quantization") or {}
    return {
        "name": name,
        "type": config.get("model_type"),
        "weights": show_bytes(n_bytes),
        "weight_bits": quantization.get("bits"),
    }


def _user(content: str) -> Message:
    return {"role": "user", "content": content}
