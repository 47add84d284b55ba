"""`mlx-lm-kvpersist quality`: how each KV precision changes a model's output."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import count
from operator import eq
from pathlib import Path
from typing import Any

from mlx_lm.models.cache import make_prompt_cache
from rich.table import Table

from ..cache.geometry.spec import ModelCacheSpec, position_limit
from ..cache.measuring.divergence import Predictions, encode, part_means, placed
from ..config import DEFAULT_BITS, KV_BITS
from ..errors import ConfigError, ModelNotSupported
from ..units import show_bytes
from . import quality_checks as checks
from .output import Report, progress, table
from .servers import OWN_TEXT
from .spec import load_named

REFERENCE = "16"
"""The model's own precision, with which every other precision is compared."""

_MIN_TOKENS = 64
_WINDOW, _STRIDE = 1024, 512
"""Tokens that the model sees in one call (a window), and tokens between the starts of windows."""
_REPLY_TOKENS = 24
_TOOL_TOKENS = 64
_TOOL_CHARS = 3000
"""Length of the text before the tool calls: more than a block of 256 tokens."""

_ESTIMATES = ("perplexity", "perplexity_rise", "agreement", "divergence_nats")
_Said = tuple[list[list[int]], list[list[int]]]
"""The ids of the replies to questions, and to prompts for tool calls."""


def run(args: argparse.Namespace) -> Report:
    text_name, text = read_text(args.text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    about_text = {"name": text_name, "chars": len(text), "sha256": digest}
    model, tokenizer = load_named(args.model)
    begin, ids = encode(tokenizer, text)
    if len(ids) < _MIN_TOKENS:
        raise ConfigError(
            f"{text_name} has {len(ids)} tokens; at least {_MIN_TOKENS} are needed to say anything"
        )
    with checks.server_attention():
        specs, left_out = _specs(model)
        if not specs:
            reasons = "; ".join(sorted(set(left_out.values())))
            why = f"Nothing of this model's cache is quantized, so nothing changes: {reasons}"
            content = {"model": args.model, "text": about_text, "rows": [], "left_out": left_out}
            return Report({**content, "why": why}, why)
        windows = checks.windows_of(ids, begin, _WINDOW, _STRIDE)
        context = args.context if args.context > 0 else None
        questions: list[list[int]] = []
        if context:
            document = checks.document_with_facts(tokenizer, text, context)
            for question in checks.QUESTIONS:
                questions.append(checks.prompt_of(tokenizer, f"{document}\n\n{question}"))
        calls = checks.tool_prompts(tokenizer, text[:_TOOL_CHARS])
        with progress("quality") as on_progress:
            rows = _measured(
                model, tokenizer, specs, text_name, windows, questions, calls, on_progress
            )
    dtype = next(group.keys.dtype for spec in specs.values() for group in spec.full if group.keys)
    n_predicted = sum(len(window) - n_context for window, n_context in windows)
    content = {
        "model": args.model,
        "reference": dtype,
        "text": {**about_text, "tokens": len(ids), "predicted": n_predicted},
        "window": _WINDOW,
        "stride": _STRIDE,
        "needle_context": context,
        "template_takes_tools": bool(calls),
        "rows": rows,
        "left_out": left_out,
    }
    heading = (
        f"{args.model} on {text_name}: {n_predicted:,} tokens predicted, in windows of "
        f"{_WINDOW:,} that advance by {_STRIDE:,}. Compared with {REFERENCE}, the model's "
        f"own {dtype}. ±: standard error.\n"
    )
    reasons_left_out = (f"{name}: left out, {reason}" for name, reason in left_out.items())
    return Report(content, heading, _table(rows), *reasons_left_out)


def _judged(
    tokenizer: Any, expected: Sequence[Any], replies: _Said, own: _Said
) -> dict[str, dict[str, int | None] | None]:
    """Return a row's fields about replies, hidden facts (`needles`) and tool calls.

    A field is None if nothing was tried. `own` has the answers in the model's own precision. `same`
    counts answers that equal `own` in the first tokens or in the call. `found` counts answers with
    the hidden number or the `expected` call.
    """
    first = slice(checks.FIRST_TOKENS)
    same = [reply[first] == mine[first] for reply, mine in zip(replies[0], own[0], strict=True)]
    facts = zip(checks.THINGS.values(), replies[0], strict=False)
    n_found = sum(number in tokenizer.decode(reply).replace(",", "") for number, reply in facts)
    same_facts = same[: len(checks.THINGS)]
    calls, own_calls = (
        [checks.tool_call_in(tokenizer, tokenizer.decode(reply)) or reply for reply in answers[1]]
        for answers in (replies, own)
    )
    counts = {
        "replies": (len(same), None, sum(same)),
        "needles": (len(same_facts), n_found, sum(same_facts)),
        "tool_calls": (len(calls), sum(map(eq, calls, expected)), sum(map(eq, calls, own_calls))),
    }
    fields = ("tried", "found", "same")
    return {
        name: dict(zip(fields, numbers, strict=True)) if numbers[0] else None
        for name, numbers in counts.items()
    }


def _measured(
    model: Any,
    tokenizer: Any,
    specs: Mapping[str, ModelCacheSpec],
    text_name: str,
    windows: Sequence[checks.Window],
    questions: Sequence[list[int]],
    calls: Sequence[tuple[list[int], Any]],
    on_progress: Callable[[int, int], None],
) -> list[dict[str, Any]]:
    """Return the rows for JSON: the model's own precision first, then each of `specs`.

    Each row is compared with the first. `perplexity_rise` is relative. `agreement` is the share of
    equal next tokens. `divergence_nats` is the mean Kullback-Leibler divergence, `texts` the
    divergence by text. `bits_per_number` includes scales and biases.
    """
    part_ids, places = placed(tokenizer)
    part_ids = part_ids[: position_limit(model)]
    makers: dict[str, checks.MakeCache] = {name: spec.make_cache for name, spec in specs.items()}
    everyone: dict[str, checks.MakeCache] = {REFERENCE: partial(make_prompt_cache, model), **makers}
    prompts, expected_calls = [prompt for prompt, _ in calls], [call for _, call in calls]
    done, total = count(1), len(windows) + 1 + 2 * len(everyone)

    def one_more() -> None:
        on_progress(next(done), total)

    by_name = {name: Predictions() for name in makers}
    for window, n_context in windows:
        for name, read in checks.predicted(model, window, makers).items():
            by_name[name].add(read, n_context - 1)
        one_more()
    passages = checks.predicted(model, part_ids, makers)
    one_more()
    for predictions in (by_name, passages):
        predictions[REFERENCE] = next(iter(predictions.values())).own
    ends = set(tokenizer.eos_token_ids)
    first = next(iter(specs.values()))
    own_bytes = sum(group.full_precision_bytes for group in first.full)
    rows, own = list[dict[str, Any]](), None
    for name, make_cache in everyone.items():
        answers = checks.replies_to(model, questions, make_cache, _REPLY_TOKENS, ends)
        one_more()
        called = checks.replies_to(model, prompts, make_cache, _TOOL_TOKENS, ends)
        one_more()
        own = own or (answers, called)
        n_bytes = specs[name].bytes_per_token if name in specs else own_bytes
        texts = {text_name: by_name[name].divergence_nats.value}
        texts |= part_means(passages[name].divergence, places)
        rows.append(
            {
                "precision": name,
                "layout": specs[name].layout if name in specs else "full",
                "bits_per_number": first.bits_per_number * n_bytes / first.bytes_per_token,
                "kv_bytes_per_token": float(n_bytes),
                **{estimate: asdict(getattr(by_name[name], estimate)) for estimate in _ESTIMATES},
                "divergence_p99_nats": by_name[name].divergence_p99_nats,
                "texts": texts,
                "worst_text": max(texts, key=lambda text: texts[text]),
                **_judged(tokenizer, expected_calls, (answers, called), own),
            }
        )
    return rows


def _specs(model: Any) -> tuple[dict[str, ModelCacheSpec], dict[str, str]]:
    """Return the spec of each supported precision, and why each other precision is left out."""
    specs: dict[str, ModelCacheSpec] = {}
    left_out: dict[str, str] = {}
    for name in (name for name in KV_BITS if name != REFERENCE):
        try:
            spec = checks.served(model, KV_BITS[name])
        except ModelNotSupported as error:
            left_out[name] = str(error)
            continue
        if spec.quantized:
            specs[name] = spec
        else:
            reasons = (group.why for group in spec.full if group.why)
            left_out[name] = next(reasons, "no layer of this model is quantized")
    return specs, left_out


def read_text(path: Path | None) -> tuple[str, str]:
    """Return name and text of a file, or of the package's story. Raises ConfigError."""
    if path is None:
        return "the package's own story", OWN_TEXT.read_text(encoding="utf-8")
    try:
        content = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error.reason}") from error
    if not content.strip():
        raise ConfigError(f"{path} is empty")
    return str(path), content


def _table(rows: Sequence[Mapping[str, Any]]) -> Table:
    def estimate(row: Mapping[str, Any], name: str, form: str) -> str:
        return f"{row[name]['value']:{form}} ± {row[name]['error']:{form.lstrip('+')}}"

    def share(row: Mapping[str, Any], name: str, counted: str) -> str:
        counts = row[name]
        return f"{counts[counted]} of {counts['tried']}" if counts else "-"

    cells = [
        {
            "bits": row["precision"] + " (default)" * (row["precision"] == DEFAULT_BITS),
            "a number": f"{row['bits_per_number']:.2f}",
            "a token": show_bytes(row["kv_bytes_per_token"]),
            "perplexity": estimate(row, "perplexity", ".3f"),
            "change": estimate(row, "perplexity_rise", "+.2%"),
            "same next token": estimate(row, "agreement", ".1%"),
            "KL nats": estimate(row, "divergence_nats", ".4f"),
            "at 99%": f"{row['divergence_p99_nats']:.3f}",
            "worst text": f"{row['texts'][row['worst_text']]:.4f}, {row['worst_text']}",
            "same replies": share(row, "replies", "same"),
            "facts found": share(row, "needles", "found"),
            "right calls": share(row, "tool_calls", "found"),
            "same calls": share(row, "tool_calls", "same"),
        }
        for row in rows
    ]
    return table([*cells[0]], [[*row.values()] for row in cells], right="perplexity change")
