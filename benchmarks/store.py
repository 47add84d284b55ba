"""How fast blocks are saved and loaded, against the disk itself and a copy in memory.

    python -m benchmarks.store [--model synthetic:llama-3.1-8b] [--tokens 8192]

Blocks of random numbers in the model's layout, through the store that the server uses: checksums,
index, rename. No weights are needed: a shape is enough. The disk's own rate is that of plain files
as big as the blocks' and as many, written and read by one call each. A restore is load and join,
until all layers' caches can be decoded with; a hot join makes them of 32,768 tokens in RAM. Kinds
of work take turns within each repeat.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import mlx.core as mx
import numpy as np
from mlx_lm.utils import load_model

from mlx_lm_kvpersist.block import Block, Root, block_key, pack_ids
from mlx_lm_kvpersist.cache.blocks.cut_join import (
    BLOCK_TOKENS,
    Piece,
)
from mlx_lm_kvpersist.cache.geometry.probe import probe_model
from mlx_lm_kvpersist.cache.geometry.spec import ModelCacheSpec
from mlx_lm_kvpersist.cache.live.packed import headroom
from mlx_lm_kvpersist.host.answers import Prompt
from mlx_lm_kvpersist.request.lookup import Lookup
from mlx_lm_kvpersist.request.model import LoadedModel
from mlx_lm_kvpersist.store import files as store_files
from mlx_lm_kvpersist.store.block_store import BlockStore, Commit, StoreLimits
from mlx_lm_kvpersist.store.records import Leaf
from tests.support.joined import Pieces, join, n_bytes

from .models import SYNTHETIC, find_model
from .page_cache import drop_cached_pages
from .report import FOLDER, Result, device_slug
from .runs import Deadline, median, parser
from .shapes import MODEL_SHAPES, shaped_architecture

N_TOKENS = 8192
N_HOT_TOKENS = 32768
ROOT = Root("benchmark", "random")
_MB = 1e6
_GB = 1e9
_HUGE = 1 << 62
_HOT, _HOT_COPY = "join, hot 32K", "copy in memory, 32K"

Stored = tuple[Block, Mapping[str, mx.array]]


@dataclass(frozen=True)
class Layout:
    """The form of the blocks: the model's name, and its cache's geometry."""

    name: str
    spec: ModelCacheSpec


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--tokens", type=int, default=N_TOKENS)
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--folder", type=Path, help="on the disk to measure (default: temporary)")
    args = options.parse_args()
    layout = layout_of(args.model, args.models_dir)
    refuse_windows(layout)
    out = args.out or FOLDER / device_slug()
    measure(layout, out, args.tokens, args.repeats, args.folder, Deadline(args.deadline)).show()


def layout_of(name: str, models_dir: Path) -> Layout:
    """Return the layout of what `--model` names; of a synthetic shape nothing is made."""
    shape = name.removeprefix(SYNTHETIC)
    if shape in MODEL_SHAPES:
        return Layout(name, probe_model(shaped_architecture(shape)))
    found = find_model(name, models_dir)
    return Layout(found.name, probe_model(load_model(found.path, lazy=True)[0]))


def refuse_windows(layout: Layout) -> None:
    """End with one line where blocks alone are not all that is stored."""
    if not layout.spec.any_prefix:
        raise SystemExit(
            f"{layout.name} has layers with windows or states, which are stored as parts; "
            "this measures blocks alone: choose a model all of whose layers hold every token"
        )


def measure(
    layout: Layout,
    out: Path,
    n_tokens: int,
    n_repeats: int,
    parent: Path | None = None,
    deadline: Deadline | None = None,
) -> Result:
    deadline = deadline or Deadline()
    folder = Path(tempfile.mkdtemp(prefix="kvpersist-store-", dir=parent))
    about = {"name": layout.name, "layout": layout.spec.describe()}
    slug = layout.name.lower().replace(":", "-").replace("/", "-")
    result = Result(
        f"store-{slug}",
        "Saving and loading a conversation's blocks, against the disk and the memory.",
        {"tokens": n_tokens, "repeats": n_repeats},
        model=about,
        folder=out,
    )
    try:
        blocks = random_blocks(layout.spec, n_tokens)
        bench = _Bench(layout.spec, blocks, folder)
        times: dict[str, list[float]] = defaultdict(list)
        worst_s = 0.0
        for repeat in range(n_repeats):
            if not deadline.allows(worst_s):
                result.leave_out(f"store, repeat {repeat + 1}")
                break
            started = time.monotonic()
            bench.run(times)
            worst_s = max(worst_s, time.monotonic() - started)
        result.content["setting"]["page cache left after dropping"] = bench.share_left
        result.add(*bench.rows(times))
        result.add(*turns(layout.spec, folder / "turns"))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return result


def random_blocks(spec: ModelCacheSpec, n_tokens: int) -> list[Stored]:
    """Return a chain of blocks whose arrays are random and all different."""
    rng = np.random.Generator(np.random.SFC64(0))
    forms: dict[int, dict[str, mx.array]] = {}
    blocks: list[Stored] = []
    for node in chain(n_tokens):
        # Numbers as good as new, without the time that making them takes.
        n, n_tokens = len(blocks), node.n_tokens
        if n_tokens not in forms:
            forms[n_tokens] = {
                name: mx.array(rng.integers(0, 1 << 32, shape, np.uint32))
                if dtype == mx.uint32
                else mx.array(rng.standard_normal(shape, np.float32)).astype(dtype)
                for name, shape, dtype in spec.block_arrays(n_tokens)
            }
        new = {
            name: array ^ n if array.dtype == mx.uint32 else array + n
            for name, array in forms[n_tokens].items()
        }
        mx.eval(new)
        blocks.append((node, new))
    return blocks


def chain(n_tokens: int, seed: int = 0, block_tokens: int = BLOCK_TOKENS) -> list[Block]:
    """Return the blocks of a conversation of random ids."""
    rng = np.random.Generator(np.random.SFC64(seed))
    nodes: list[Block] = []
    parent = ROOT.key
    for start in range(0, n_tokens, block_tokens):
        n = min(block_tokens, n_tokens - start)
        packed = pack_ids(rng.integers(0, 100_000, n).tolist())
        node = Block(block_key(parent, packed), parent, start, packed, "word " * n)
        nodes.append(node)
        parent = node.key
    return nodes


class _Bench:
    """Each kind of work once per `run`; the files of the last run stay for the next to replace."""

    def __init__(self, spec: ModelCacheSpec, blocks: Sequence[Stored], folder: Path) -> None:
        self.spec = spec
        self.blocks = blocks
        self.folder = folder
        self.n_bytes = sum(n_bytes(arrays) for _, arrays in blocks)
        self.sizes = [n_bytes(arrays) for _, arrays in blocks]
        self.n_hot = -(-N_HOT_TOKENS // sum(node.n_tokens for node, _ in blocks))
        """How many times the blocks are joined to make a prompt of 32K tokens."""
        self.share_left: float | None = None
        self.disk_bytes = 0

    def run(self, times: dict[str, list[float]]) -> None:
        ours, plain = self.folder / "ours", self.folder / "plain"
        for path in (ours, plain):
            shutil.rmtree(path, ignore_errors=True)
            os.sync()  # no run pays for what the one before left to be written
        times["save"].append(self._save(ours))
        times["write plain files"].append(self._write_plain(plain))
        for state in ("cold", "warm"):
            kinds = {
                "load": partial(self._load, ours),
                "restore": partial(self._restore, ours),
                "read plain files": partial(self._read_plain, plain),
            }
            for what, work in kinds.items():
                if state == "cold":  # the other's stay, to be warm afterwards
                    read = plain if what == "read plain files" else ours
                    files = [file for file in read.rglob("*") if file.is_file()]
                    self.share_left = drop_cached_pages(files)
                times[f"{what}, {state}"].append(work())
        with mock.patch.object(store_files, "checksum", lambda arrays, known: known["checksum"]):
            times["load without checksum, warm"].append(self._load(ours))
        times["copy in memory"].append(self._copy())
        times[_HOT].append(self._join_hot())
        times[_HOT_COPY].append(self._copy(self.n_hot))

    def rows(self, times: dict[str, list[float]]) -> list[dict[str, Any]]:
        over = {
            "save": "write plain files",
            "load, cold": "read plain files, cold",
            "restore, cold": "read plain files, cold",
            "load, warm": "copy in memory",
            "restore, warm": "copy in memory",
            _HOT: _HOT_COPY,
        }
        rows = []
        for what, seconds in times.items():
            took = median(seconds)
            assert took is not None
            other = over.get(what)
            total = self.n_bytes * (self.n_hot if what in (_HOT, _HOT_COPY) else 1)
            rows.append(
                {
                    "what": what,
                    "MB": total / _MB,
                    "seconds": took,
                    "GB/s": total / _GB / took,
                    "rate over": other,
                    "ratio": median([b / a for a, b in zip(seconds, times[other], strict=True)])
                    if other
                    else None,
                }
            )
        rows.append(
            {
                "what": "on disk, index included",
                "MB": self.disk_bytes / _MB,
                "bytes a token": self.disk_bytes / sum(node.n_tokens for node, _ in self.blocks),
                "over KV": self.disk_bytes / self.n_bytes,
            }
        )
        return rows

    def _save(self, folder: Path) -> float:
        store = open_store(folder, self.n_bytes * 2)
        store.drain()
        nodes = tuple(node for node, _ in self.blocks)
        turn = Commit(ROOT, nodes, Leaf("long", nodes[-1].key, nodes[-1].stop))
        started = time.perf_counter()
        store.commit(turn, self.blocks)
        store.drain()
        took = time.perf_counter() - started
        assert store.turns_saved == 1, "the turn was not saved"
        self.disk_bytes = store.disk.used_bytes()
        store.close()
        return took

    def _load(self, folder: Path) -> float:
        """Return the seconds of loading all blocks."""
        with self._opened(folder) as store:
            started = time.perf_counter()
            loading = store.reader.load_all([node for node, _ in self.blocks], ROOT)
            for _ in self.blocks:
                loaded = next(loading)
                assert loaded is not None and loaded.tier == "disk"
            return time.perf_counter() - started

    def _restore(self, folder: Path) -> float:
        """Return the seconds of making caches of all blocks, as the server does."""
        model = LoadedModel(None, None, self.spec, ROOT.fingerprint, None)
        ids = [token for node, _ in self.blocks for token in node.ids]
        prompt = Prompt([*ids, *range(64)], [[*ids, *range(64)]], ["user"])
        with self._opened(folder) as store:
            started = time.perf_counter()
            reuse = Lookup(prompt, ROOT, store, model, canary=False).restore()
            took = time.perf_counter() - started
        assert reuse.outcome.n_restored == len(ids)
        return took

    @contextmanager
    def _opened(self, folder: Path) -> Iterator[BlockStore]:
        store = open_store(folder, 0)
        store.drain()
        mx.clear_cache()  # each run pays for memory of its own, as the first of a server does
        touch_memory(2 * self.n_bytes)
        yield store
        store.close()

    def _write_plain(self, folder: Path) -> float:
        folder.mkdir()
        content = memoryview(np.random.default_rng(0).bytes(max(self.sizes)))
        started = time.perf_counter()
        for n, size in enumerate(self.sizes):
            descriptor = os.open(folder / str(n), os.O_CREAT | os.O_WRONLY, 0o600)
            os.write(descriptor, content[:size])
            os.close(descriptor)
        return time.perf_counter() - started

    def _read_plain(self, folder: Path) -> float:
        buffer = bytearray(max(self.sizes))
        view = memoryview(buffer)
        started = time.perf_counter()
        for n, size in enumerate(self.sizes):
            with open(folder / str(n), "rb", buffering=0) as file:
                assert file.readinto(view[:size]) == size
        return time.perf_counter() - started

    def _join_hot(self) -> float:
        """Return the seconds of making caches of blocks in RAM, until they can be decoded with."""
        whole = [arrays for node, arrays in self.blocks if node.n_tokens == BLOCK_TOKENS]
        pieces = [Piece(arrays, 0, BLOCK_TOKENS) for arrays in whole] * self.n_hot
        n_tokens = sum(piece.stop for piece in pieces)
        mx.clear_cache()
        touch_memory(2 * self.n_bytes * self.n_hot)
        started = time.perf_counter()
        mx.eval([cache.state for cache in join(self.spec, Pieces(n_tokens, pieces), headroom(1))])
        return time.perf_counter() - started

    def _copy(self, n_times: int = 1) -> float:
        """Copy as many bytes into memory that is new, as a restore's is."""
        sources = [np.ones(size, np.uint8) for size in self.sizes]
        touch_memory(self.n_bytes * n_times)
        started = time.perf_counter()
        copies = [source.copy() for source in sources * n_times]
        took = time.perf_counter() - started
        assert len(copies) == len(sources) * n_times
        return took


def touch_memory(n_bytes: int) -> None:
    """Use so much memory and let it go again.

    A virtual machine gives away what it does not use, and to get it back takes its host longer
    than anything that is measured here.
    """
    np.ones(n_bytes, np.uint8)


def turns(spec: ModelCacheSpec, folder: Path, n_turns: int = 6) -> list[dict[str, Any]]:
    """Return what a few turns of one conversation write, each 300 tokens long."""
    per_token = spec.bytes_per_token
    limits_bytes = 64 * BLOCK_TOKENS * per_token
    store = open_store(folder, limits_bytes)
    store.drain()
    written = 0
    rows = []
    tail: Block | None = None
    for turn in range(1, n_turns + 1):
        nodes = chain(300 * turn)
        new = [node for node in nodes if node.key not in store]
        arrays = [_zeros(spec, node.n_tokens) for node in new]
        replaced: tuple[tuple[bytes, bytes], ...] = ()
        if tail is not None and tail not in nodes:
            replaced = ((tail.key, next(n.key for n in nodes if n.start == tail.start)),)
        leaf = Leaf("growing", nodes[-1].key, nodes[-1].stop, replaced)
        store.commit(Commit(ROOT, tuple(nodes), leaf), zip(new, arrays, strict=True))
        store.drain()
        tail = nodes[-1] if nodes[-1].n_tokens < BLOCK_TOKENS else None
        total = store.disk.n_written_bytes
        rows.append(
            {
                "what": f"turn {turn} of 300 tokens, written",
                "MB": (total - written) / _MB,
                "bytes a token": (total - written) / 300,
                "over KV": (total - written) / (300 * per_token),
            }
        )
        written = total
    store.close()
    return rows


def _zeros(spec: ModelCacheSpec, n_tokens: int) -> dict[str, mx.array]:
    arrays = {name: mx.zeros(form, dtype) for name, form, dtype in spec.block_arrays(n_tokens)}
    mx.eval(arrays)
    return arrays


def open_store(folder: Path, max_ram_bytes: int) -> BlockStore:
    return BlockStore(folder, StoreLimits(max_ram_bytes, _HUGE))


if __name__ == "__main__":
    main()
