"""`mlx-lm-kvpersist quality`: how each KV precision changes a model's output."""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from mlx_lm.models.cache import make_prompt_cache

from ..cache.geometry.spec import ModelCacheSpec
from ..config import DEFAULT_BITS, KV_BITS, precision_of
from ..errors import ConfigError, ModelNotSupported
from ..units import show_bytes
from .output import console, print_json, print_table, progress, tell
from .quality_advice import REFERENCE, TARGET_NATS, Needles, Row, ToolCall, caveats, recommend
from .quality_checks import (
    SECRET,
    TOOL,
    TOOL_QUESTION,
    MakeCache,
    OnProgress,
    greedy,
    n_text_steps,
    needle_prompts,
    prompt_of,
    score_text,
    takes_tools,
    tool_call_in,
    windows_of,
)
from .spec import load_named, pictures
from .story import OWN_TEXT

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
    specs, left_out = _specs(args, model)
    if not specs:
        reasons = "; ".join(sorted(set(left_out.values())))
        why = f"Nothing of this model's cache is quantized, so nothing changes: {reasons}"
        content = {"model": args.model, "text": about_text, "rows": [], "left_out": left_out}
        tell(args, {**content, "recommended": REFERENCE, "why": why}, why)
        return 0
    first = next(iter(specs.values()))
    dtype = next(group.keys.dtype for group in first.full if group.keys is not None)
    makers: dict[str, MakeCache] = {REFERENCE: partial(make_prompt_cache, model)}
    makers |= {name: spec.make_cache for name, spec in specs.items()}
    windows = windows_of(ids, begin, args.window, args.stride)
    with_tools = takes_tools(tokenizer)
    n_needles = 0 if args.no_needle else len(_DEPTHS)
    total = n_text_steps(windows) + len(makers) * (n_needles + with_tools)
    done = 0
    with progress("quality") as on_progress:

        def one_more() -> None:
            nonlocal done
            done += 1
            on_progress(done, total)

        scores = score_text(model, windows, makers, one_more)
        ask = partial(_replies, model, tokenizer, makers, one_more)
        depths = () if args.no_needle else _DEPTHS
        hidden = needle_prompts(tokenizer, text, args.context, depths)
        needles = [ask(ids, _NEEDLE_TOKENS) for _, ids in hidden]
        question = prompt_of(tokenizer, TOOL_QUESTION, [TOOL]) if with_tools else []
        calls = ask(question, _TOOL_TOKENS) if with_tools else {}
    own_bytes = sum(group.full_precision_bytes for group in first.full)
    rows = [
        Row(
            precision=name,
            layout=specs[name].layout if name in specs else "full",
            bits_per_number=first.bits_per_number * n_bytes / first.bytes_per_token,
            kv_bytes_per_token=float(n_bytes),
            perplexity=score.perplexity,
            perplexity_rise=score.perplexity_rise,
            agreement=score.agreement,
            divergence_nats=score.divergence_nats,
            needles=_needles_of(needles, name),
            tool_call=_tool_call_of(tokenizer, calls, name),
        )
        for name, score in scores.items()
        for n_bytes in [specs[name].bytes_per_token if name in specs else own_bytes]
    ]
    advice = recommend(rows, TARGET_NATS)
    noted = caveats(rows, TARGET_NATS)
    if args.json:
        print_json(
            {
                "model": args.model,
                "reference": dtype,
                "text": {**about_text, "tokens": len(ids), "predicted": scores[REFERENCE].n_tokens},
                "window": args.window,
                "stride": args.stride,
                "needle_context": None if args.no_needle else args.context,
                "template_takes_tools": with_tools,
                "rows": [asdict(row) for row in rows],
                "left_out": left_out,
                "caveats": noted,
                "recommended": advice[0],
                "why": advice[1],
            }
        )
        return 0
    console().print(
        f"{args.model} on {text_name}: {scores[REFERENCE].n_tokens:,} tokens predicted, in windows "
        f"of {args.window:,} that advance by {args.stride:,}. Compared with {REFERENCE}, the "
        f"model's own {dtype}. ±: standard error.\n"
    )
    _print_rows(rows)
    for side, picture in pictures(specs[DEFAULT_BITS]).items() if DEFAULT_BITS in specs else ():
        console().print(f"{DEFAULT_BITS}: bits of the {side} by layer: {picture}")
    left = (f"{name}: left out, {reason}" for name, reason in left_out.items())
    for line in (*left, *noted, "", advice[1]):
        console().print(line)
    return 0


def _specs(
    args: argparse.Namespace, model: Any
) -> tuple[dict[str, ModelCacheSpec], dict[str, str]]:
    """Return the spec of every precision that the model can be kept in, and why not in others."""
    specs: dict[str, ModelCacheSpec] = {}
    left_out: dict[str, str] = {}
    for name in KV_BITS:
        if name == REFERENCE:
            continue
        args.kvpersist_kv_bits = name
        try:
            spec = ModelCacheSpec.probe(model, precision_of(args))
        except ModelNotSupported as error:
            left_out[name] = str(error)
            continue
        if any(group.precision for group in spec.full):
            specs[name] = spec
        else:
            reasons = [group.why for group in spec.full if group.why]
            left_out[name] = reasons[0] if reasons else "no layer of this model is quantized"
    return specs, left_out


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
    model: Any,
    tokenizer: Any,
    makers: Mapping[str, MakeCache],
    on_progress: OnProgress,
    ids: list[int],
    max_tokens: int,
) -> dict[str, str]:
    """Return the reply of each precision to a prompt."""
    ends = set(tokenizer.eos_token_ids)
    replies = {}
    for name, make_cache in makers.items():
        said = greedy(model, ids, make_cache(), max_tokens, ends)
        replies[name] = tokenizer.decode(said)
        on_progress()
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
            f"{row.bits_per_number:.2f}",
            show_bytes(row.kv_bytes_per_token),
            f"{row.perplexity.value:.3f} ± {row.perplexity.error:.3f}",
            f"{row.perplexity_rise.value:+.2%} ± {row.perplexity_rise.error:.2%}",
            f"{row.agreement.value:.1%} ± {row.agreement.error:.1%}",
            f"{row.divergence_nats.value:.4f} ± {row.divergence_nats.error:.4f}",
            f"{row.needles.found} of {row.needles.tried}" if row.needles else "-",
            f"{row.needles.same} of {row.needles.tried}" if row.needles else "-",
            yes[row.tool_call.parses] if row.tool_call else "-",
            yes[row.tool_call.same] if row.tool_call else "-",
        ]
        for row in rows
    ]
    columns = [
        *("bits", "a number", "a token", "perplexity", "change", "same next token", "KL nats"),
        *("needle found", "same reply", "tool call parses", "same call"),
    ]
    print_table(columns, table, right="perplexity change")
