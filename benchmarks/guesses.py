"""Decoding a reply that repeats its conversation, with and without guesses (`--kvpersist-draft`).

    python -m benchmarks.guesses FILE... [--model synthetic:tiny] [--tokens 600]

For each text file there are five replies: the `file` again, with a line in 40 changed; `edits` of
it, as calls that quote a few lines before and after; both `unread`, where only an earlier
conversation has the file; and `prose`, the second half after the first. The other files are stored.
Whatever the model predicts, the sampler says the reply, so the work is that of a model which
replies just so. Batches of one, caches of the default precision, the server's attention; plain and
guessing in turns. Milliseconds a token, of wall time and of CPU.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm import load

from mlx_lm_kvpersist.block import pack_ids
from mlx_lm_kvpersist.cache.geometry.kinds import most_taken_back
from mlx_lm_kvpersist.cache.geometry.on_grid import end_on_grid
from mlx_lm_kvpersist.cache.live.quantized import batch_of
from mlx_lm_kvpersist.cli.quality_checks import served, server_attention
from mlx_lm_kvpersist.config import DEFAULT_BITS, KV_BITS
from mlx_lm_kvpersist.host.answers import TakenRequest
from mlx_lm_kvpersist.host.manager import Taken, TakenTokens
from mlx_lm_kvpersist.host.scheduling.guesses import MOST, Guesses
from mlx_lm_kvpersist.match.runs import Runs

from .models import DEFAULT_MODELS_DIR, find_model
from .report import Result

stock: Any = import_module("mlx_lm.generate")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--model", default="synthetic:tiny")
    parser.add_argument("--tokens", type=int, default=600, help="most tokens of a reply")
    parser.add_argument("--out", type=Path, help="folder of the results")
    args = parser.parse_args()
    measure(args.model, args.files, args.tokens, args.out).show()


def replies_to(text: str, rng: random.Random) -> dict[str, tuple[str, str]]:
    """Return the kinds of replies to a text: the prompt, and what is said."""
    lines = text.splitlines(keepends=True)
    changed = [line if rng.randrange(40) else f"{line.rstrip()} changed\n" for line in lines]
    calls = []
    for at in range(3, len(lines) - 4, max(1, len(lines) // 6)):
        old, new = "".join(lines[at - 3 : at + 4]), "".join(changed[at - 3 : at + 4])
        edit = {"path": "src/file.py", "old_string": old, "new_string": new + "one more line\n"}
        calls.append(f"<tool_call>{json.dumps({'name': 'edit', 'arguments': edit})}</tool_call>\n")
    half = len(text) // 2
    return {
        "file": (f"{text}\nWrite it again.\n", "".join(changed)),
        "edits": (f"{text}\nChange it.\n", "".join(calls)),
        "unread file": ("Write it again.\n", "".join(changed)),
        "unread edits": ("Change it.\n", "".join(calls)),
        "prose": (text[:half], text[half:]),
    }


class Stored(TakenRequest):
    """A request of a server that has stored some texts."""

    def __init__(self, texts: list[list[int]]) -> None:
        self._runs = Runs(pack_ids([one for text in texts for one in text]))

    def guess(self, run: Sequence[int], n: int) -> Sequence[int]:
        return self._runs.after(run, n)


def loaded(name: str) -> tuple[Any, Callable[[], list[Any]]]:
    """Return a model, and what makes its caches of the default precision."""
    model: Any = load(str(find_model(name, DEFAULT_MODELS_DIR).path))[0]
    end_on_grid(model)
    with server_attention():
        return model, served(model, KV_BITS[DEFAULT_BITS]).make_cache


def measure(name: str, files: list[Path], n_tokens: int, out: Path | None = None) -> Result:
    """Return a row for each text and kind of reply."""
    found = find_model(name, DEFAULT_MODELS_DIR)
    model, make_caches = loaded(name)
    rows: list[dict[str, Any]] = []
    texts = {file: found.tokenizer.encode(file.read_text(encoding="utf-8")) for file in files}
    with server_attention():
        for file in files:
            asked = replies_to(file.read_text(encoding="utf-8"), random.Random(file.name))
            for kind, (prompt, said) in asked.items():
                is_unread = kind.startswith("unread")
                stored = Stored([ids for one, ids in texts.items() if is_unread or one != file])
                ids = found.tokenizer.encode(prompt)
                reply = found.tokenizer.encode(said)[:n_tokens]
                row: dict[str, Any] = {"text": file.name, "reply": kind, "tokens": len(reply)}
                # The first of the two has the kernels of both to load.
                for guesses in (None, Guesses(most_taken_back), None):
                    ms, cpu_ms, n_steps = decode(model, make_caches(), ids, reply, guesses, stored)
                    side = "plain" if guesses is None else "guessing"
                    row |= {f"{side} ms": ms, f"{side} CPU ms": cpu_ms}
                    if guesses is not None:
                        row["tokens a step"] = len(reply) / n_steps
                row["times as fast"] = row["plain ms"] / row["guessing ms"]
                row["times as fast, CPU"] = row["plain CPU ms"] / row["guessing CPU ms"]
                rows.append(row)
    about = "Milliseconds a token of a reply that is alone, with guesses and without."
    setting = {"most tokens": n_tokens}
    result = Result(f"guesses-{found.slug}", about, setting, model=found.about(), folder=out)
    result.add(*rows)
    return result


def decode(
    model: Any,
    caches: list[Any],
    prompt: list[int],
    reply: list[int],
    guesses: Guesses | None,
    stored: TakenRequest,
) -> tuple[float, float, int]:
    """Have `reply` said after `prompt`; return milliseconds a token, and the number of steps."""
    for start in range(0, len(prompt) - 1, 512):
        model(mx.array([prompt[:-1][start : start + 512]]), cache=caches)
        mx.eval([cache.state for cache in caches])
    script = [*prompt, *reply, *[reply[-1]] * (MOST + 1)]

    n_known = n_rows = 0

    def say(logprobs: mx.array) -> mx.array:
        nonlocal n_known, n_rows  # a step asks for its tokens one by one
        n_rows = n_rows + 1 if len(batch_tokens) == n_known else 1
        n_known = len(batch_tokens)
        ids = mx.array([script[n_known + n_rows]])
        said: list[mx.array] = mx.depends([ids], [mx.argmax(logprobs, axis=-1)])
        return said[0]

    batch_tokens = TakenTokens(prompt[:-1], Taken("a benchmark", stored))
    stops: dict[str, Any]
    if hasattr(stock, "StopSequences"):
        stops = {"stop_sequences": [stock.StopSequences([])]}
    else:  # 0.31.3
        stops = {"state_machines": [stock.SequenceStateMachine({}, initial="normal")]}
    batch = stock.GenerationBatch(
        model=model,
        uids=[0],
        inputs=mx.array(prompt[-1:]),
        prompt_cache=[batch_of([cache]) for cache in caches],
        tokens=[batch_tokens],
        samplers=[None],
        fallback_sampler=say,
        logits_processors=[[]],
        max_tokens=[len(reply)],
        **stops,
    )
    started, cpu_s, n_steps = time.perf_counter(), time.process_time(), 0
    while len(batch):
        batch.next() if guesses is None else guesses.next(batch)
        n_steps += 1
    assert batch_tokens == [*prompt, *reply]
    seconds, cpu_s = time.perf_counter() - started, time.process_time() - cpu_s
    return 1e3 * seconds / len(reply), 1e3 * cpu_s / len(reply), n_steps


if __name__ == "__main__":
    main()
