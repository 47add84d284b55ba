"""How long it takes to find a conversation among many, and how much memory that holds.

    python -m benchmarks.lookup [--sessions 10 100 1000 10000] [--tokens 32768]

Only the index is filled, with sessions of as many tokens; the text is random words, the tokenizer a
trained one. A lookup is what a request without a session key costs before its blocks are loaded.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlx_lm.tokenizer_utils import load as load_tokenizer

from mlx_lm_kvpersist.match.keys import Root, block_key, pack_ids
from mlx_lm_kvpersist.match.text import TokenText
from mlx_lm_kvpersist.match.tree import Node, match_text
from mlx_lm_kvpersist.store.index import Index
from mlx_lm_kvpersist.synthetic import synthetic_text, train_tokenizer

from .report import Result
from .runs import Deadline

N_SESSIONS = (10, 100, 1000)
N_TOKENS = 32_768
BLOCK_TOKENS = 256
N_SHARED_BLOCKS = 16
"""Blocks of a system prompt that all sessions begin with."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sessions", type=int, nargs="+", default=list(N_SESSIONS))
    parser.add_argument("--tokens", type=int, default=N_TOKENS, help="of each session")
    parser.add_argument("--out", type=Path, help="folder of the result")
    args = parser.parse_args()
    measure_all(args.out, args.sessions, args.tokens).show()


def measure_all(
    out: Path | None,
    sessions: Sequence[int],
    n_tokens: int,
    deadline: Deadline | None = None,
) -> Result:
    """Fill an index with each number of sessions in turn, the largest last, and look up in it."""
    deadline = deadline or Deadline()
    result = Result(
        "lookup",
        "Time to find one of many conversations by its text.",
        {"tokens per session": n_tokens, "shared by all": N_SHARED_BLOCKS * BLOCK_TOKENS},
        folder=out,
    )
    s_per_session = 0.0
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        train_tokenizer("byte-level", 600, bos=False).save(path)
        tokenizer: Any = load_tokenizer(path)
        tokens = TokenText.of(tokenizer)
        assert tokens is not None
        vocabulary = tokenizer.encode(synthetic_text(60_000), add_special_tokens=False)
        for n_sessions in sorted(sessions):
            if not deadline.allows(1.5 * s_per_session * n_sessions):
                result.leave_out(f"lookup among {n_sessions:,} sessions")
                continue
            started = time.monotonic()
            index_path = path / f"{n_sessions}.sqlite"
            result.add(measure(index_path, n_sessions, n_tokens, vocabulary, tokens))
            s_per_session = (time.monotonic() - started) / n_sessions
    return result


def measure(
    path: Path, n_sessions: int, n_tokens: int, vocabulary: list[int], tokens: TokenText
) -> dict[str, Any]:
    index = Index(path)
    root = Root("benchmark", "4b64")
    rng = random.Random(n_sessions)
    shared = session_ids(rng, vocabulary, N_SHARED_BLOCKS * BLOCK_TOKENS)
    asked: list[str] = []
    for n in range(n_sessions):
        ids = shared + session_ids(rng, vocabulary, n_tokens - len(shared))
        index.add_blocks(root, chain(ids, root.key, tokens))
        if n % max(1, n_sessions // 10) == 0:
            asked.append(tokens.decode(ids) + " and a new question")
    index.checkpoint()
    before = rss_bytes()
    times: dict[str, list[float]] = {"found": [], "edited": [], "unknown": []}
    for text in asked:
        middle = len(text) // 2
        for kind, prompt in (
            ("found", text),
            ("edited", text[:middle] + "!!" + text[middle:]),
            ("unknown", "~" + text),
        ):
            started = time.perf_counter()
            match = match_text(index, root.key, prompt, tokens)
            times[kind].append((time.perf_counter() - started) * 1e3)
            assert (match.n_tokens >= n_tokens - 1) == (kind == "found"), kind
    row = {
        "sessions": n_sessions,
        "blocks": index.n_blocks(),
        "index MB": path.stat().st_size / 1e6,
        **{f"{kind} ms": statistics.median(values) for kind, values in times.items()},
        "slowest ms": max(max(values) for values in times.values()),
        "memory MB": (rss_bytes() - before) / 1e6,
    }
    index.close()
    path.unlink()
    return row


def session_ids(rng: random.Random, vocabulary: list[int], n_tokens: int) -> list[int]:
    """Return `n_tokens` ids put together from pieces of real text."""
    ids: list[int] = []
    while len(ids) < n_tokens:
        start = rng.randrange(len(vocabulary) - 64)
        ids += vocabulary[start : start + 64]
    return ids[:n_tokens]


def chain(ids: list[int], parent: bytes, tokens: TokenText) -> list[tuple[Node, int]]:
    nodes = []
    pending = b""
    for start in range(0, len(ids), BLOCK_TOKENS):
        part = ids[start : start + BLOCK_TOKENS]
        packed = pack_ids(part)
        key = block_key(parent, packed)
        text, pending = tokens.feed(part, pending)
        nodes.append((Node(key, parent, start, packed, text, pending), 1))
        parent = key
    return nodes


def rss_bytes() -> int:
    """Return the memory of this process now, or its peak where that is not told."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


if __name__ == "__main__":
    main()
