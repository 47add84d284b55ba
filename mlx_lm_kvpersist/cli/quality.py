"""`mlx-lm-kvpersist quality`: how 8 and 4 bits of KV change a model's output."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from ..units import show_bytes
from .output import console, print_json, print_table, progress, tell
from .quality_advice import REFERENCE, Needles, Row, ToolCall, caveats, recommend
from .quality_checks import (
    CHOICES,
    SECRET,
    TOOL,
    TOOL_QUESTION,
    Told,
    greedy,
    n_text_steps,
    needle_prompts,
    prompt_of,
    quantizable,
    score_text,
    spec_for,
    takes_tools,
    tool_call_in,
    windows_of,
)
from .spec import load_named

OWN_TEXT = Path(__file__).with_name("quality_text.txt")
_DEPTHS = (0.1, 0.5, 0.9)
_MIN_TOKENS = 64
_NEEDLE_TOKENS = 24
_TOOL_TOKENS = 128


def run(args: argparse.Namespace) -> int:
    """Run the command; return the exit status. Raises KVPersistError where it fails."""
    if not 0 < args.stride < args.window:
        raise ConfigError(f"--stride {args.stride} must be less than --window {args.window}")
    text_name, text = read_text(args.text)
    digest = hashlib.sha256(text.encode()).hexdigest()
    about_text = {"name": text_name, "chars": len(text), "sha256": digest}
    model, tokenizer = load_named(args.model)
    begin, ids = encode(tokenizer, text)
    if len(ids) < _MIN_TOKENS:
        raise ConfigError(
            f"{text_name} has {len(ids)} tokens; at least {_MIN_TOKENS} are needed to say anything"
        )
    why_not = quantizable(model, CHOICES)
    names = [name for name, reason in why_not.items() if reason is None]
    left_out = {name: reason for name, reason in why_not.items() if reason is not None}
    if set(names) <= {REFERENCE}:
        reasons = "; ".join(sorted(set(left_out.values())))
        why = f"Nothing of this model's cache is quantized, so nothing changes: {reasons}"
        content = {"model": args.model, "text": about_text, "rows": [], "left_out": left_out}
        tell(args, {**content, "recommended": REFERENCE, "why": why}, why)
        return 0
    windows = windows_of(ids, begin, args.window, args.stride)
    with_tools = takes_tools(tokenizer)
    n_needles = 0 if args.no_needle else len(_DEPTHS)
    total = n_text_steps(windows) + len(names) * (n_needles + with_tools)
    done = 0
    with progress("quality") as told:

        def one_more() -> None:
            nonlocal done
            done += 1
            told(done, total)

        choices = {name: CHOICES[name] for name in names}
        scores = score_text(model, windows, choices, one_more)
        ask = partial(_replies, model, tokenizer, names, one_more)
        depths = () if args.no_needle else _DEPTHS
        hidden = needle_prompts(tokenizer, text, args.context, depths)
        needles = [ask(ids, _NEEDLE_TOKENS) for _, ids in hidden]
        question = prompt_of(tokenizer, TOOL_QUESTION, [TOOL]) if with_tools else []
        calls = ask(question, _TOOL_TOKENS) if with_tools else {}
    own = scores[REFERENCE]
    rows = [
        Row(
            precision=name,
            kv_bytes_per_token=float(spec_for(model, CHOICES[name]).bytes_per_token),
            perplexity=score.perplexity,
            perplexity_rise=score.perplexity / own.perplexity - 1,
            agreement=score.agreement,
            divergence_nats=score.mean_divergence,
            needles=_needles_of(needles, name),
            tool_call=_tool_call_of(tokenizer, calls, name),
        )
        for name, score in scores.items()
    ]
    advice = recommend(rows)
    if args.json:
        print_json(
            {
                "model": args.model,
                "text": {**about_text, "tokens": len(ids), "predicted": own.n_tokens},
                "window": args.window,
                "stride": args.stride,
                "needle_context": None if args.no_needle else args.context,
                "template_takes_tools": with_tools,
                "rows": [asdict(row) for row in rows],
                "left_out": left_out,
                "caveats": caveats(rows),
                "recommended": advice[0],
                "why": advice[1],
            }
        )
        return 0
    console().print(
        f"{args.model} on {text_name}: {own.n_tokens:,} tokens predicted, in windows of "
        f"{args.window:,} that advance by {args.stride:,}\n"
    )
    _print_rows(rows)
    left = (f"{name}: left out, {reason}" for name, reason in left_out.items())
    for line in (*left, *caveats(rows), "", advice[1]):
        console().print(line)
    return 0


def read_text(path: Path | None) -> tuple[str, str]:
    """Return name and text of a file, or of the package's own story; ConfigError without a text."""
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


def encode(tokenizer: Any, text: str) -> tuple[list[int], list[int]]:
    """Return the begin token (an empty list where there is none) and the text's ids without it."""
    ids = list(tokenizer.encode(text, add_special_tokens=False))
    bos = tokenizer.bos_token_id
    begins = bos is not None and list(tokenizer.encode("a"))[:1] == [bos]
    return ([bos] if begins else []), ids


def _replies(
    model: Any, tokenizer: Any, names: Sequence[str], told: Told, ids: list[int], max_tokens: int
) -> dict[str, str]:
    """Return the reply of each precision to a prompt."""
    ends = set(tokenizer.eos_token_ids)
    replies = {}
    for name in names:
        said = greedy(model, ids, CHOICES[name], max_tokens, ends)
        replies[name] = tokenizer.decode(said)
        told()
    return replies


def _needles_of(needles: list[dict[str, str]], name: str) -> Needles | None:
    if not needles:
        return None
    pairs = [(replies[name], replies[REFERENCE]) for replies in needles]
    found = sum(SECRET in reply.replace(",", "") for reply, _ in pairs)
    return Needles(len(pairs), found, sum(reply == reference for reply, reference in pairs))


def _tool_call_of(tokenizer: Any, replies: dict[str, str], name: str) -> ToolCall | None:
    if not replies:
        return None
    call, reference = (tool_call_in(tokenizer, replies[each]) for each in (name, REFERENCE))
    neither = call is None and reference is None
    same = replies[name] == replies[REFERENCE] if neither else call == reference
    return ToolCall(call is not None, same)


def _print_rows(rows: Sequence[Row]) -> None:
    yes = {True: "yes", False: "no"}
    table = [
        [
            row.precision,
            show_bytes(row.kv_bytes_per_token),
            f"{row.perplexity:.3f}",
            f"{row.perplexity_rise:+.2%}",
            f"{row.agreement:.1%}",
            f"{row.divergence_nats:.4f}",
            f"{row.needles.found} of {row.needles.tried}" if row.needles else "-",
            f"{row.needles.same} of {row.needles.tried}" if row.needles else "-",
            yes[row.tool_call.parses] if row.tool_call else "-",
            yes[row.tool_call.same] if row.tool_call else "-",
        ]
        for row in rows
    ]
    columns = [
        *("bits", "a token", "perplexity", "change", "same next token", "KL nats"),
        *("needle found", "same reply", "tool call parses", "same call"),
    ]
    print_table(columns, table, right="bits perplexity change")
