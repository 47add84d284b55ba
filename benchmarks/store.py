"""How fast blocks are saved and loaded, compared with plain files and a copy in memory.

    python -m benchmarks.store [--model synthetic:llama-3.1-8b] [--tokens 8192] [--folder FOLDER]

Blocks of random numbers, in the model's layout and the default precision, go through the store that
the server uses: checksums, index, rename. Plain files of the same sizes are written and read by one
call each. A restore loads blocks and joins them to caches with which all layers can decode.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.utils import load_model

from mlx_lm_kvpersist.block import Block, Root, block_key, pack_ids
from mlx_lm_kvpersist.cache.blocks import BLOCK_TOKENS, Arrays
from mlx_lm_kvpersist.cache.geometry.spec import ModelCacheSpec, probe_model
from mlx_lm_kvpersist.config import DEFAULT_BITS, KV_BITS
from mlx_lm_kvpersist.host.hooks import Prompt
from mlx_lm_kvpersist.request.lookup import Lookup
from mlx_lm_kvpersist.request.model import LoadedModel
from mlx_lm_kvpersist.store.block_store import BlockStore, Commit, StoreLimits
from mlx_lm_kvpersist.store.records import Leaf
from tests.support.joined import n_bytes

from .checks import WrongMeasurement
from .models import SYNTHETIC
from .page_cache import drop_cached_pages
from .runs import BOTH, Run, parser, run_of, show, tokens
from .servers import OURS, STOCK, rotated

QUESTION = "store"
ROOT = Root("benchmark", "random")


def measure(run: Run, n_tokens: int, n_repeats: int, parent: Path | None = None) -> None:
    """Measure saving and loading blocks; `n_tokens` is a multiple of 256.

    Raises WrongMeasurement for a model with windows or states, which are not stored as blocks.
    """
    spec = probe_model(load_model(run.model.path, lazy=True)[0], KV_BITS[DEFAULT_BITS])
    if not spec.any_prefix:
        raise WrongMeasurement(f"the run ends: {run.model.name} has layers with windows or states")
    with tempfile.TemporaryDirectory(prefix="kvpersist-store-", dir=parent) as name:
        work = Work(spec, n_tokens, Path(name))
        for repeat in range(n_repeats):
            for what, sides in work.rows():
                for side in rotated(BOTH, repeat):
                    run.report.add(QUESTION, what, side, "s", sides[side]())
    for side, n in ((OURS, work.disk_bytes), (STOCK, work.n_bytes)):
        run.report.add(QUESTION, "bytes on disk", side, "MB", n / 1e6)
    left = work.share_left
    run.report.note(
        QUESTION,
        f"{tokens(n_tokens)} tokens, {work.n_bytes / 1e6:,.0f} MB. The column stock does not show "
        "a server. Its rows save and cold show plain files of the same sizes, its rows warm show a "
        "copy in memory, and its bytes are the keys and values without the store. The page cache "
        + ("cannot be dropped here." if left is None else f"still had {left:.0%} of cold files."),
    )


class Work:
    """Times each kind of work: with the store, and with plain files or memory alone."""

    def __init__(self, spec: ModelCacheSpec, n_tokens: int, folder: Path) -> None:
        self.spec, self.blocks = spec, random_blocks(spec, n_tokens)
        self.sizes = [n_bytes(arrays) for _, arrays in self.blocks]
        self.n_bytes = sum(self.sizes)
        self.disk_bytes = 0
        self.share_left: float | None = None
        self._ours, self._plain = folder / "ours", folder / "plain"

    def rows(self) -> Iterator[tuple[str, dict[str, Callable[[], float]]]]:
        """Yield each row's name, and the functions that time its two sides.

        The first row writes the files that all other rows read.
        """
        for path in (self._ours, self._plain):
            shutil.rmtree(path, ignore_errors=True)
        os.sync()  # so that the row does not wait for writes of earlier repeats
        yield "save", {OURS: self._save, STOCK: self._write_plain}
        for what, work in (("load", self._load), ("restore", self._restore)):
            files = [path for path in self._ours.parent.rglob("*") if path.is_file()]
            self.share_left = drop_cached_pages(files)
            yield f"{what}, cold", {OURS: work, STOCK: self._read_plain}
            yield f"{what}, warm", {OURS: work, STOCK: self._copy}

    def _save(self) -> float:
        with opened(self._ours, 2 * self.n_bytes) as store:
            nodes = tuple(node for node, _ in self.blocks)
            commit = Commit(ROOT, nodes, Leaf("long", nodes[-1].key, nodes[-1].stop))
            started_s = time.perf_counter()
            store.commit(commit, self.blocks)
            store.drain()
            seconds = time.perf_counter() - started_s
            if store.turns_saved != 1:
                raise WrongMeasurement("the run ends: the store did not save the blocks")
            self.disk_bytes = store.disk.used_bytes()
        return seconds

    def _load(self) -> float:
        self._use_memory()
        with opened(self._ours, 0) as store:
            started_s = time.perf_counter()
            loaded = list(store.reader.load_all([node for node, _ in self.blocks], ROOT))
            seconds = time.perf_counter() - started_s
        if any(block is None or block.tier != "disk" for block in loaded):
            raise WrongMeasurement("the run ends: the store did not read all blocks from disk")
        return seconds

    def _restore(self) -> float:
        model = LoadedModel(None, None, self.spec, ROOT.fingerprint, None)
        ids = [token for node, _ in self.blocks for token in node.ids]
        prompt = Prompt([*ids, *range(64)], [[*ids, *range(64)]], ["user"])
        self._use_memory()
        with opened(self._ours, 0) as store:
            started_s = time.perf_counter()
            reuse = Lookup(prompt, ROOT, store, model, canary=False).restore()
            seconds = time.perf_counter() - started_s
        if (n := reuse.outcome.n_restored) != len(ids):
            raise WrongMeasurement(f"the run ends: {n:,} of {len(ids):,} tokens were restored")
        return seconds

    def _write_plain(self) -> float:
        self._plain.mkdir(exist_ok=True)
        content = memoryview(np.random.default_rng(0).bytes(max(self.sizes)))
        started_s = time.perf_counter()
        for n, size in enumerate(self.sizes):
            (self._plain / str(n)).write_bytes(content[:size])
        return time.perf_counter() - started_s

    def _read_plain(self) -> float:
        view = memoryview(bytearray(max(self.sizes)))
        started_s = time.perf_counter()
        for n, size in enumerate(self.sizes):
            with open(self._plain / str(n), "rb", buffering=0) as file:
                file.readinto(view[:size])
        return time.perf_counter() - started_s

    def _copy(self) -> float:
        sources = [np.ones(size, np.uint8) for size in self.sizes]
        self._use_memory()
        started_s = time.perf_counter()
        np.concatenate(sources)
        return time.perf_counter() - started_s

    def _use_memory(self) -> None:
        """The first use of memory is slow in a virtual machine."""
        mx.clear_cache()
        np.ones(2 * self.n_bytes, np.uint8)


def random_blocks(spec: ModelCacheSpec, n_tokens: int) -> list[tuple[Block, Arrays]]:
    """Return a chain of full blocks; no two arrays are equal."""
    rng = np.random.Generator(np.random.SFC64(0))
    # Making random numbers is slow, so they are made once. Each block changes them.
    first = {
        name: mx.array(rng.integers(0, 1 << 32, shape, np.uint32))
        if dtype == mx.uint32
        else mx.array(rng.standard_normal(shape, np.float32)).astype(dtype)
        for name, shape, dtype in spec.block_arrays(BLOCK_TOKENS)
    }
    blocks: list[tuple[Block, Arrays]] = []
    parent = ROOT.key
    for n in range(n_tokens // BLOCK_TOKENS):
        packed = pack_ids(rng.integers(0, 100_000, BLOCK_TOKENS).tolist())
        key, text = block_key(parent, packed), "word " * BLOCK_TOKENS
        node = Block(key, parent, n * BLOCK_TOKENS, packed, text)
        arrays = {k: x ^ n if x.dtype == mx.uint32 else x + n for k, x in first.items()}
        mx.eval(arrays)
        blocks.append((node, arrays))
        parent = key
    return blocks


def opened(folder: Path, max_ram_bytes: int) -> closing[BlockStore]:
    """Return a folder's store, for a `with` block, after it has read its index."""
    store = BlockStore(folder, StoreLimits(max_ram_bytes, max_disk_bytes=1 << 62))
    store.drain()
    return closing(store)


def main() -> None:
    options = parser(__doc__, model=f"{SYNTHETIC}llama-3.1-8b", n_tokens=8192)
    options.add_argument("--folder", type=Path, help="a folder on the disk to measure")
    args = options.parse_args()
    run = run_of(args, QUESTION)
    measure(run, args.tokens, args.repeats, args.folder)
    show(run, STOCK)


if __name__ == "__main__":
    main()
