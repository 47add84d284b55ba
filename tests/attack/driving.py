"""A tiny model with a store, and the model's answers without any store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.utils import load

from mlx_lm_kvpersist.cache.geometry.kinds import end_on_grid
from mlx_lm_kvpersist.cache.geometry.spec import probe_model
from mlx_lm_kvpersist.host.hooks import REPLY, Prompt
from mlx_lm_kvpersist.match import TokenText
from mlx_lm_kvpersist.request.lookup import Lookup, Reuse
from mlx_lm_kvpersist.request.model import LoadedModel
from mlx_lm_kvpersist.request.outcome import Outcome
from mlx_lm_kvpersist.request.replies import remember
from mlx_lm_kvpersist.request.saver import RunningSequence
from mlx_lm_kvpersist.store.block_store import BlockStore, StoreLimits
from mlx_lm_kvpersist.store.files import checksum, metadata_of
from tests.support.store_files import block_path, read_file
from tests.support.synthetic import Message, make_tiny_model, synthetic_text

TOLERANCE = 2e-3
"""For logits of size 10, as in tests/request: another order of summation changes quantized KV."""
LIMITS = StoreLimits(1 << 30, 1 << 30)


def load_model(folder: Path, *, seed: int = 0, fingerprint: str = "fingerprint") -> LoadedModel:
    """Make and load a model of 2 layers, the smallest whose KV is quantized."""
    make_tiny_model(
        folder, seed=seed, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=32, vocab_size=600
    )
    model, tokenizer = load(str(folder))
    end_on_grid(model)  # without a plan its attention reads arrays
    return LoadedModel(model, tokenizer, probe_model(model), fingerprint, TokenText.of(tokenizer))


@dataclass
class Answer:
    """The result of a prompt: the ids fed, the logits after them, the reuse."""

    ids: list[int]
    caches: list[Any]
    logits: mx.array
    outcome: Outcome


def compute_rest(loaded: LoadedModel, reuse: Reuse) -> Answer:
    """Compute the part of a prompt that was not restored."""
    n_reused = reuse.outcome.n_reused
    caches = reuse.caches or loaded.spec.make_cache()
    ids = list(reuse.prompt.ids)
    logits = forward(loaded, ids[n_reused:], caches)
    return Answer(ids, caches, logits, reuse.outcome)


@dataclass
class Talk:
    """Drives store and model as the server does, without the server."""

    loaded: LoadedModel
    store: BlockStore

    @property
    def folder(self) -> Path:
        return self.store.folder

    def remember(self, ids: list[int], session: str | None = None) -> None:
        """Compute a turn without reuse, and store it; its prompt is all but the last 5 tokens."""
        caches = self.loaded.spec.make_cache()
        forward(self.loaded, ids, caches)
        self.keep(ids, caches, len(ids) - 5, session)

    def ask(self, ids: list[int], *, canary: bool = True) -> Answer:
        """Look a prompt up and compute the part that is not restored."""
        prompt = Prompt(ids, [ids], ["user"])
        root = self.loaded.root
        reuse = Lookup(prompt, root, self.store, self.loaded, canary=canary).restore()
        return compute_rest(self.loaded, reuse)

    def go_on(self, answer: Answer, n_tokens: int, session: str | None = None) -> list[int]:
        """Continue an answer greedily and store the turn; return all ids."""
        ids, logits = list(answer.ids), answer.logits
        for _ in range(n_tokens):
            ids.append(int(mx.argmax(logits)))
            logits = forward(self.loaded, ids[-1:], answer.caches)
        self.keep(ids, answer.caches, len(answer.ids), session)
        return ids

    def keep(
        self,
        ids: list[int],
        caches: list[Any],
        n_prompt: int,
        session: str | None = None,
        messages: list[Message] | None = None,
    ) -> None:
        """Store a turn whose prompt is the first `n_prompt` ids, rendered from messages."""
        sequence = RunningSequence(self.loaded.root, n_prompt, session=session)
        self.loaded.save(sequence, ids, caches, REPLY, self.store)
        detokenizer = self.loaded.tokenizer.detokenizer
        for token_id in ids[n_prompt:]:
            detokenizer.add_token(token_id)
        detokenizer.finalize()
        remember(
            messages or [],
            ids[:n_prompt],
            ids[n_prompt:],
            {"content": detokenizer.text},
            self.loaded.root,
            self.store,
            self.loaded,
        )

    def forget_hot_blocks(self) -> None:
        self.store.drain()
        self.store.pool.clear()

    def blocks(self, ids: list[int]) -> list[Path]:
        """Return the files of a conversation's blocks, in order."""
        self.store.drain()
        paths: list[Path] = []
        parent, start = self.loaded.root.key, 0
        while start < len(ids):
            node = next(
                node
                for node in self.store.index.children(parent)
                if node.ids == ids[start : start + node.n_tokens]
            )
            paths.append(block_path(self.folder, node.key))
            parent, start = node.key, node.stop
        return paths


@contextmanager
def talk_with(loaded: LoadedModel, folder: Path, limits: StoreLimits = LIMITS) -> Iterator[Talk]:
    store = BlockStore(folder, limits)
    try:
        yield Talk(loaded, store)
    finally:
        store.close()


def forward(loaded: LoadedModel, ids: list[int], caches: list[Any]) -> mx.array:
    """Feed ids; return the logits of the last id, [vocab]."""
    logits: mx.array = loaded.model(mx.array([ids]), cache=caches)[0, -1]
    mx.eval(logits, [cache.state for cache in caches])
    return logits


@dataclass
class Cold:
    """The model's answers without a store; each prompt is computed once."""

    loaded: LoadedModel
    _logits: dict[tuple[int, ...], mx.array] = field(default_factory=dict)

    def logits(self, ids: list[int]) -> mx.array:
        key = tuple(ids)
        if key not in self._logits:
            self._logits[key] = forward(self.loaded, ids, self.loaded.spec.make_cache())
        return self._logits[key]

    def difference(self, answer: Answer) -> float:
        """Return the largest difference of an answer's logits from those without a store."""
        return float(mx.abs(answer.logits - self.logits(answer.ids)).max())

    def check(self, answer: Answer, label: str = "") -> None:
        difference = self.difference(answer)
        assert difference < TOLERANCE, f"{label}: logits differ by {difference}: {answer.outcome}"


def conversation_ids(loaded: LoadedModel, n_tokens: int, seed: int) -> list[int]:
    """Return the ids of text that differs between seeds from the first line on."""
    ids: list[int] = loaded.tokenizer.encode(f"{seed}: {synthetic_text(4 * n_tokens, seed)}")
    return ids[:n_tokens]


def replace_payload(path: Path, other: Path) -> None:
    """Give a block the arrays of another block of the same length, with a valid checksum."""
    folder = path.parents[2]
    node, root, _ = read_file(block_path(folder, bytes.fromhex(path.stem)))
    _, _, arrays = read_file(block_path(other.parents[2], bytes.fromhex(other.stem)))
    metadata = metadata_of(node, root)
    metadata["checksum"] = checksum(arrays, metadata)
    path.unlink()
    mx.save_safetensors(str(path), dict(arrays), metadata)
