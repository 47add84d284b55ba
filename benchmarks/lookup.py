"""How long it takes to find a conversation among many, and how much memory that holds.

    python -m benchmarks.lookup [--sessions 10 100 1000 10000] [--tokens 32768]
    python -m benchmarks.lookup --siblings 100 5000 20000 --verify 2000

Only the index is filled, with sessions of as many tokens; the text is random words, the tokenizer a
trained one. A lookup is what a request without a session key costs before its blocks are loaded.
`--siblings` looks up a new conversation among as many that begin with one system prompt, by text
and by ids, and saves its first turn. `--verify` checks and rebuilds a store of as many sessions
of ten blocks, with tiny files.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.tokenizer_utils import load as load_tokenizer

from mlx_lm_kvpersist.block import Block, Root, block_key, pack_ids
from mlx_lm_kvpersist.match.text import TokenText
from mlx_lm_kvpersist.match.tree import match_prompt
from mlx_lm_kvpersist.store.disk import DiskStore
from mlx_lm_kvpersist.store.index import Index, Leaf
from mlx_lm_kvpersist.store.rebuild import rebuild_index
from mlx_lm_kvpersist.store.records import Commit, StoreLimits
from mlx_lm_kvpersist.store.verify import find_problems
from tests.support.synthetic import synthetic_text, train_tokenizer

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
    parser.add_argument("--siblings", type=int, nargs="+", help="below one system prompt")
    parser.add_argument("--verify", type=int, help="sessions of a store to check and rebuild")
    args = parser.parse_args()
    if args.siblings:
        measure_siblings(args.out, args.siblings).show()
    if args.verify:
        measure_verify(args.out, args.verify).show()
    if not args.siblings and not args.verify:
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
    index.database.empty_log()
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
            match = match_prompt(index, root.key, prompt, tokens)
            times[kind].append((time.perf_counter() - started) * 1e3)
            assert (match.n_tokens >= n_tokens - 1) == (kind == "found"), kind
    row = {
        "sessions": n_sessions,
        "blocks": index.totals().n_blocks,
        "index MB": path.stat().st_size / 1e6,
        **{f"{kind} ms": statistics.median(values) for kind, values in times.items()},
        "slowest ms": max(max(values) for values in times.values()),
        "memory MB": (rss_bytes() - before) / 1e6,
    }
    index.close()
    path.unlink()
    return row


def measure_siblings(out: Path | None, counts: Sequence[int]) -> Result:
    """Look up and save a new conversation below a block with each number of children."""
    result = Result(
        "siblings",
        "Time to look up and save a new conversation among others with one system prompt.",
        {"tokens per block": BLOCK_TOKENS},
        folder=out,
    )
    tokens = TokenText({n: f"{n} ".encode() for n in range(5000)})
    rng = random.Random(1)
    root = Root("benchmark", "4b64")

    def block(parent: Block | None) -> Block:
        ids = [rng.randrange(5000) for _ in range(BLOCK_TOKENS)]
        packed, above = pack_ids(ids), parent.key if parent else root.key
        start = parent.stop if parent else 0
        return Block(block_key(above, packed), above, start, packed, tokens.decode(ids))

    for n_siblings in sorted(counts):
        with tempfile.TemporaryDirectory() as folder:
            index = Index(Path(folder) / "index.sqlite")
            head = block(None)
            siblings = [block(head) for _ in range(n_siblings)]
            index.add_blocks(root, [(node, 1) for node in (head, *siblings)])
            prompts = [[*head.ids, *rng.choice(siblings).ids[:64], *block(head).ids]]
            prompts += [[*head.ids, *block(head).ids] for _ in range(20)]
            texts, packed = [tokens.decode(ids) for ids in prompts], [*map(pack_ids, prompts)]
            new = [[(block(head), 1)] for _ in range(20)]
            asked: dict[str, list[Callable[[], object]]] = {
                "by text ms": [partial(match_prompt, index, root.key, t, tokens) for t in texts],
                "by ids ms": [partial(match_prompt, index, root.key, ids) for ids in packed],
                "save ms": [partial(index.commit, Commit(root, ()), b) for b in new],
                "all bytes ms": [index.totals] * 20,
                "first to evict ms": [partial(first_to_evict, index)] * 20,
            }
            row: dict[str, Any] = {"siblings": n_siblings}
            for name, acts in asked.items():
                row[name] = statistics.median(map(timed_ms, acts))
            result.add(row)
            index.close()
    return result


def measure_verify(out: Path | None, n_sessions: int, n_blocks: int = 10) -> Result:
    """Check and rebuild a store of sessions with tiny files."""
    result = Result("verify", "Time to check and rebuild a store.", {}, folder=out)
    root = Root("benchmark", "4b64")
    arrays = {"0.k": mx.zeros((1, 1, 1, 8))}
    with tempfile.TemporaryDirectory() as folder:
        disk = DiskStore(Path(folder), StoreLimits(0, 1 << 40))
        for n in range(n_sessions):
            parent, nodes = root.key, []
            for start in range(n_blocks):
                packed = pack_ids([start, n])
                node = Block(block_key(parent, packed), parent, 2 * start, packed, f"{start} {n}")
                nodes.append(node)
                parent = node.key
            leaf = Leaf(f"session {n}", parent, 2 * n_blocks)
            file_of = partial(disk.new_file, arrays=arrays)
            disk.save([partial(Commit, root, tuple(nodes), leaf)], file_of)
        row: dict[str, Any] = {"sessions": n_sessions, "blocks": disk.index.totals().n_blocks}
        problems: list[object] = []
        row["verify s"] = timed_ms(lambda: problems.extend(find_problems(disk.folder, disk.index)))
        row["rebuild s"] = timed_ms(lambda: rebuild_index(disk.folder))
        row |= {name: row[name] / 1e3 for name in ("verify s", "rebuild s")}
        assert not problems
        result.add(row)
        disk.close()
    return result


def first_to_evict(index: Index) -> object:
    return next(index.unused("benchmark"))


def timed_ms(act: Callable[[], object]) -> float:
    started = time.perf_counter()
    act()
    return (time.perf_counter() - started) * 1e3


def session_ids(rng: random.Random, vocabulary: list[int], n_tokens: int) -> list[int]:
    """Return `n_tokens` ids put together from pieces of real text."""
    ids: list[int] = []
    while len(ids) < n_tokens:
        start = rng.randrange(len(vocabulary) - 64)
        ids += vocabulary[start : start + 64]
    return ids[:n_tokens]


def chain(ids: list[int], parent: bytes, tokens: TokenText) -> list[tuple[Block, int]]:
    nodes = []
    pending = b""
    for start in range(0, len(ids), BLOCK_TOKENS):
        part = ids[start : start + BLOCK_TOKENS]
        packed = pack_ids(part)
        key = block_key(parent, packed)
        text, pending = tokens.feed(part, pending)
        nodes.append((Block(key, parent, start, packed, text, pending), 1))
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
