"""Tables of figures for README.md and docs/, from the files of `benchmarks/results`.

No other text of README.md or docs/ repeats these figures. After a measurement, run
`python -m benchmarks.report` and `python -m tools.docs`.
"""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill

from benchmarks import decode as decoding
from benchmarks import together as bursts
from benchmarks import ttft
from benchmarks.chart import CONTEXTS, points
from benchmarks.report import DeviceResults, kept_results, show_table, shown_number
from benchmarks.runs import tokens
from benchmarks.servers import OURS, OURS_16, STOCK

_STATES = {
    "after a restart": "the next turn, after a restart",
    "new prompt": "a new prompt",
    "same prompt again": "the same prompt again",
    "next turn": "the next turn",
}


def shown_results() -> DeviceResults:
    """Return the results that the pages show: those of a GPU, if there are any."""
    return kept_results()[0]


def in_short() -> str:
    """Return seconds to the first token of the longest prompt that was measured three times."""
    results = shown_results()
    n = longest(results)
    rows = []
    for state in ("after a restart", "new prompt", "next turn"):
        stock, ours = first_token_s(results, state, n)
        size = f"{n:,} tokens" + (", page cache dropped" if state == "after a restart" else "")
        rows.append((_STATES[state], shown_number(stock), f"**{shown_number(ours)}**", size))
    header = ("seconds to the first token", "stock", "with the plugin", "prompt")
    return f"{show_table(header, rows)}\n\n{conditions()}"


def longest(results: DeviceResults) -> int:
    """Return the longest prompt with the most repeats, in tokens."""

    def n_repeats(n: int) -> int:
        return len(results.values(ttft.QUESTION, f"new prompt, {tokens(n)}", OURS))

    return max(CONTEXTS, key=lambda n: (n_repeats(n), n))


def first_token_s(
    results: DeviceResults, state: str, n_tokens: int
) -> tuple[float | None, float | None]:
    """Return seconds of stock and the plugin; after a restart stock computes a new prompt."""
    stock_state = "new prompt" if state == "after a restart" else state
    return (
        results.median(ttft.QUESTION, f"{stock_state}, {tokens(n_tokens)}", STOCK),
        results.median(ttft.QUESTION, f"{state}, {tokens(n_tokens)}", OURS),
    )


def first_token() -> str:
    """Return seconds to the first token, for all lengths of prompts."""
    results = shown_results()
    rows = [
        (text, f"{n:,}", *map(shown_number, first_token_s(results, state, n)))
        for n, _ in points(results, "new prompt", OURS)
        for state, text in _STATES.items()
    ]
    return show_table(("first token after, s", "tokens", "stock", "with the plugin"), rows)


def decode() -> str:
    """Return tokens a second of replies at the same time."""
    return _both_sides(
        decoding.QUESTION, ("replies and prompts", "stock, tokens/s", "with the plugin")
    )


def together() -> str:
    """Return seconds of requests that arrive together."""
    results = shown_results()
    rows = [
        (
            what if side == OURS else f"{what}, 16 bits",
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


def _both_sides(question: str, header: Sequence[str]) -> str:
    results = shown_results()
    names = [
        row["what"] for row in results.rows if (row["question"], row["side"]) == (question, OURS)
    ]
    sides = (STOCK, OURS)
    return show_table(
        header,
        [
            (name, *(shown_number(results.median(question, name, s)) for s in sides))
            for name in names
        ],
    )


def conditions() -> str:
    """Return the device, the versions, the model, the day and the commit of the figures."""
    results = shown_results()
    part = results.parts[0]
    weights = " with random weights" if part["model"]["random_weights"] else ""
    smoke = (
        "" if results.is_preset else " This tiny model shows no more than that the commands work."
    )
    text = (
        f"{results.device.get('device_name', results.folder)} ({results.kind.upper()}), mlx-lm "
        f"{part['versions']['mlx-lm']}, {part['model']['name']}{weights}, the default precision; "
        f"measured on {part['date'][:10]} at `{'`, `'.join(results.commits)}`.{smoke}"
    )
    return fill(text, 100, break_long_words=False, break_on_hyphens=False)
