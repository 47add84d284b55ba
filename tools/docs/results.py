"""Tables of figures for README.md and docs/, from the files of `benchmarks/results`.

No other text in README.md or docs/ repeats these figures. After a measurement, run
`python -m benchmarks.report` and `python -m tools.docs`.
"""

from __future__ import annotations

import re
from textwrap import fill

from benchmarks import decode as decoding
from benchmarks import together as bursts
from benchmarks import ttft
from benchmarks.chart import CONTEXTS, points
from benchmarks.report import DeviceResults, kept_results, show_table, shown_number
from benchmarks.run_all import PRESETS
from benchmarks.runs import tokens
from benchmarks.servers import OURS, OURS_16, STOCK

Sides = tuple[float | None, float | None]
"""The values of stock and of the plugin; None: not measured."""

_STATES = {
    "new prompt": "a new prompt",
    "next turn": "the next turn",
    "same prompt again": "the same prompt again",
    "after a restart": "the next turn, after a restart",
}

_BURSTS = {bursts.ALL_TURNS: "eight next turns at once, until all replies end"}
"""The text on the page for a row of the results, if it differs from the row's name."""


def shown_results() -> DeviceResults:
    """Return a GPU's results if a GPU was measured."""
    return kept_results()[0]


def in_short() -> str:
    """Return the rows that users notice most, and the conditions."""
    results = shown_results()
    n = longest(results)
    rows = [
        (f"the first token of {text}", *_compared(first_token_s(results, state, n), "s"))
        for state, text in (
            ("after a restart", "the next turn, after a restart"),
            ("new prompt", "a new prompt"),
            ("next turn", "the next turn, without a restart"),
        )
    ]
    agents = medians(results, bursts.QUESTION, bursts.LAST)
    if None not in agents:
        what = "all first tokens of six agents with one new system prompt"
        rows.insert(2, (what, *_compared(agents, "s")))
    if n_decoded := _shortest_decoded(results):
        decoded = medians(results, decoding.QUESTION, f"1 of {tokens(n_decoded)}")
        what = f"the rest of a reply, after a prompt of {n_decoded:,} tokens"
        rows.append((what, *_compared(decoded, "tokens/s")))
    table = show_table(("you wait for", "stock", "with the plugin"), rows)
    steps = [step for part in results.parts for step in PRESETS[part["part"]].steps]
    n_system = next(step.arguments["system"] for step in steps if step.name == "together")
    prompts = (
        f"The agents' system prompt has {n_system:,} tokens. Other prompts have {n:,}, unless the "
        "row says otherwise. "
    )
    return f"{table}\n\n{conditions(prompts)}"


def _compared(sides: Sides, unit: str) -> tuple[str, str]:
    """Put the better value in bold."""
    stock, ours = sides
    texts = [f"{shown_number(side)} {unit}" if side is not None else "-" for side in sides]
    if stock is not None and ours is not None and stock != ours:
        is_ours = ours < stock if unit == "s" else ours > stock
        texts[is_ours] = f"**{texts[is_ours]}**"
    return texts[0], texts[1]


def _shortest_decoded(results: DeviceResults) -> int | None:
    """Return the shortest prompt, in tokens, after which one reply was timed alone."""
    names = {row["what"] for row in results.rows if row["question"] == decoding.QUESTION}
    return next((n for n in CONTEXTS if f"1 of {tokens(n)}" in names), None)


def medians(results: DeviceResults, question: str, what: str) -> Sides:
    return results.median(question, what, STOCK), results.median(question, what, OURS)


def longest(results: DeviceResults) -> int:
    """Return the longest prompt with at least three repeats on both sides, in tokens.

    If all prompts have fewer, the longest of the prompts with the most repeats.
    """

    def n_repeats(n: int) -> int:
        what = f"new prompt, {tokens(n)}"
        return min(len(results.values(ttft.QUESTION, what, side)) for side in (STOCK, OURS))

    return max(CONTEXTS, key=lambda n: (min(n_repeats(n), 3), n))


def first_token_s(results: DeviceResults, state: str, n_tokens: int) -> Sides:
    """After a restart, stock computes a new prompt."""
    stock_state = "new prompt" if state == "after a restart" else state
    return (
        results.median(ttft.QUESTION, f"{stock_state}, {tokens(n_tokens)}", STOCK),
        results.median(ttft.QUESTION, f"{state}, {tokens(n_tokens)}", OURS),
    )


def first_token() -> str:
    results = shown_results()
    rows = [
        (f"{n:,}", *(_both(first_token_s(results, state, n)) for state in _STATES))
        for n, _ in points(results, "new prompt", OURS)
    ]
    return show_table(("tokens", *_STATES.values()), rows)


def _both(sides: Sides) -> str:
    """Return both values for one cell. No browser breaks the line at these spaces."""
    return "\u00a0/\u00a0".join("-" if side is None else shown_number(side) for side in sides)


def decode() -> str:
    results = shown_results()
    names = [
        row["what"]
        for row in results.rows
        if (row["question"], row["side"]) == (decoding.QUESTION, OURS)
    ]
    # "2 of 16K": by the prompts' length, then by the number of replies.
    names.sort(key=lambda name: [int(number) for number in re.findall(r"\d+", name)[::-1]])
    if not names:
        return "Not measured at this commit."
    rows = [
        (
            f"{name.replace(' of ', ' after ')} tokens",
            *map(shown_number, medians(results, decoding.QUESTION, name)),
        )
        for name in names
    ]
    columns = ("replies at once, each after a prompt", "stock, tokens/s", "with the plugin")
    return show_table(columns, rows)


def together() -> str:
    results = shown_results()
    rows = [
        (
            _BURSTS.get(what, what) + ("" if side == OURS else " (16 bits)"),
            shown_number(results.median(bursts.QUESTION, what, STOCK)),
            shown_number(results.median(bursts.QUESTION, what, side)),
        )
        for what, side in (
            (bursts.ALL_TURNS, OURS),
            (bursts.ALL_TURNS, OURS_16),
            (bursts.ALONE, OURS),
            (bursts.LAST, OURS),
        )
    ]
    return show_table(("seconds", "stock", "with the plugin"), rows)


def conditions(prompts: str = "") -> str:
    """`prompts`: the first sentence, about the prompts' lengths."""
    results = shown_results()
    part = results.parts[0]
    model = part["model"]["name"]
    if part["model"]["random_weights"]:
        model = f"random weights in the shape of {model.rpartition(':')[2]}"
    smoke = "" if results.is_preset else " This tiny model shows only that the commands work."
    text = (
        f"{prompts}Measured on {part['date'][:10]} at `{'`, `'.join(results.commits)}`: "
        f"{results.shown_device}, mlx-lm {part['versions']['mlx-lm']}, {model}, "
        f"the default precision.{smoke}"
    )
    return fill(text, 100, break_long_words=False, break_on_hyphens=False)
