"""What an encrypted folder costs: blocks saved and loaded, and turns that change the index.

    python -m benchmarks.encrypted [--model synthetic:llama-3.2-1b] [--tokens 32768]

Blocks of random numbers in the model's layout go through the store that the server uses, into a
folder that is encrypted and into one that is not, in turn. CPU seconds are those of all threads.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_lm_kvpersist.store.block_store import BlockStore, Commit, StoreLimits
from mlx_lm_kvpersist.store.index import Leaf
from mlx_lm_kvpersist.store.seal import PLAIN, Seal, Sealing

from .page_cache import drop_cached_pages
from .report import FOLDER, Result, device_slug
from .runs import median
from .store import ROOT, Layout, Stored, chain, layout_of, random_blocks, refuse_windows

SEALINGS: dict[str, Sealing] = {"plain": PLAIN, "encrypted": Seal(bytes(range(32)))}
_HUGE = 1 << 50
Taken = tuple[float, float]
"""Seconds and CPU seconds."""
Work = Callable[[Path, Sealing], Taken]


class Clock:
    """Seconds and CPU seconds of all threads since it was made."""

    def __init__(self) -> None:
        self._s, self._cpu_s = time.perf_counter(), time.process_time()

    def taken(self) -> Taken:
        return time.perf_counter() - self._s, time.process_time() - self._cpu_s


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--model", default="synthetic:llama-3.2-1b")
    options.add_argument("--tokens", type=int, default=32_768)
    options.add_argument("--turns", type=int, default=500, help="small turns, for the index")
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--folder", type=Path, help="on the disk to measure (default: temporary)")
    options.add_argument("--out", type=Path, help="folder of the result")
    args = options.parse_args()
    layout = layout_of(args.model, Path())
    refuse_windows(layout)
    out = args.out or FOLDER / device_slug()
    measure(layout, out, args.tokens, args.turns, args.repeats, args.folder).show()


def measure(
    layout: Layout,
    out: Path,
    n_tokens: int,
    n_turns: int,
    n_repeats: int,
    parent: Path | None = None,
) -> Result:
    setting = {"tokens": n_tokens, "turns": n_turns, "repeats": n_repeats}
    about = {"name": layout.name, "layout": layout.spec.describe()}
    slug = layout.name.lower().replace(":", "-").replace("/", "-")
    result = Result(
        f"encrypted-{slug}",
        "Saving and loading a conversation's blocks in a folder that is encrypted, and in one that "
        "is not.",
        setting,
        model=about,
        folder=out,
    )
    blocks = random_blocks(layout.spec, n_tokens)
    mb = sum(array.nbytes for _, arrays in blocks for array in arrays.values()) / 1e6
    times: dict[str, dict[str, list[Taken]]] = defaultdict(lambda: defaultdict(list))
    work: dict[str, Work] = {
        "save": partial(_save, blocks=blocks),
        "load, cold": partial(_load, blocks=blocks, is_cold=True),
        "load, warm": partial(_load, blocks=blocks),
        f"{n_turns} turns of 8 tokens": partial(_small_turns, n_turns=n_turns),
    }
    folder = Path(tempfile.mkdtemp(prefix="kvpersist-encrypted-", dir=parent))
    try:
        for repeat in range(n_repeats):
            kinds = list(SEALINGS)[:: 1 if repeat % 2 else -1]
            for path in folder.iterdir():
                shutil.rmtree(path)
            for what, run in work.items():
                for kind in kinds:
                    place = folder / (f"{kind}-turns" if "turns" in what else kind)
                    mx.clear_cache()
                    times[what][kind].append(run(place, SEALINGS[kind]))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    result.add(*(_row(what, by_kind, mb) for what, by_kind in times.items()))
    return result


def _row(what: str, by_kind: dict[str, list[Taken]], mb: float) -> dict[str, Any]:
    row: dict[str, Any] = {"what": what}
    for kind, taken in by_kind.items():
        seconds, cpu = (median(list(column)) for column in zip(*taken, strict=True))
        assert seconds is not None
        row |= {f"{kind} s": seconds, f"{kind} CPU s": cpu}
        if "turns" not in what:
            row[f"{kind} MB/s"] = mb / seconds
    pairs = list(zip(by_kind["encrypted"], by_kind["plain"], strict=True))
    row["ratio s"] = median([a[0] / b[0] for a, b in pairs])
    row["ratio CPU s"] = median([a[1] / b[1] for a, b in pairs])
    return row


def _save(folder: Path, sealing: Sealing, blocks: Sequence[Stored]) -> Taken:
    limits = StoreLimits(3 * sum(a.nbytes for _, arrays in blocks for a in arrays.values()), _HUGE)
    with closing(BlockStore(folder, limits, sealing=sealing)) as store:
        store.drain()
        nodes = tuple(node for node, _ in blocks)
        turn = Commit(ROOT, nodes, Leaf("long", nodes[-1].key, nodes[-1].stop))
        clock = Clock()
        store.commit(turn, blocks)
        store.drain()
        taken = clock.taken()
        assert store.turns_saved == 1, "the turn was not saved"
        return taken


def _load(folder: Path, sealing: Sealing, blocks: Sequence[Stored], is_cold: bool = False) -> Taken:
    with closing(BlockStore(folder, StoreLimits(0, _HUGE), sealing=sealing)) as store:
        store.drain()
        if is_cold:
            drop_cached_pages([path for path in folder.rglob("*") if path.is_file()])
        clock = Clock()
        for loaded in store.reader.load_all([node for node, _ in blocks], ROOT):
            assert loaded is not None and loaded.tier == "disk"
        return clock.taken()


def _small_turns(folder: Path, sealing: Sealing, n_turns: int) -> Taken:
    """Save turns of conversations of their own, that are little but rows of the index."""
    array = mx.zeros((1, 1, 8, 8))
    mx.eval(array)
    with closing(BlockStore(folder, StoreLimits(1 << 30, _HUGE), sealing=sealing)) as store:
        store.drain()
        clock = Clock()
        for n in range(n_turns):
            (node,) = chain(8, seed=n)
            leaf = Leaf(f"{n}", node.key, node.stop)
            store.commit(Commit(ROOT, (node,), leaf), [(node, {"0.k": array})])
            store.drain()
        taken = clock.taken()
        assert store.turns_saved == n_turns
        return taken


if __name__ == "__main__":
    main()
