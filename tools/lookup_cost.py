"""`python -m tools.lookup_cost`: the generation thread's time to look up a long stored prompt.

A conversation is stored in RAM. The prompt spells one word of this conversation with other tokens,
so stored ids are spliced in front of the rest. The output has median CPU times in milliseconds: of
the lookup on an HTTP thread, and of the generation thread before and during the restore. Another
conversation is stored before every second restore.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from contextlib import closing
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import mlx.core as mx

from mlx_lm_kvpersist.block import BLOCK_TOKENS, Block, block_key, pack_ids
from mlx_lm_kvpersist.cache.geometry.spec import probe_model
from mlx_lm_kvpersist.host.hooks import ClientRequest, Prompt
from mlx_lm_kvpersist.match import TokenText
from mlx_lm_kvpersist.request.memory import Memory
from mlx_lm_kvpersist.request.model import LoadedModel
from mlx_lm_kvpersist.request.serving import RequestState, ServedRequest, Serving
from mlx_lm_kvpersist.round_trip import tiny_model
from mlx_lm_kvpersist.store.block_store import BlockStore, Commit, StoreLimits

N_WORDS = 900
"""The number of words. Ids of words come first, then ids of the letters that spell words."""


class Words:
    """A tokenizer of numbered words and of their letters."""

    eos_token_ids = frozenset[int]()

    def __init__(self) -> None:
        self.words = [f"{n:04} " for n in range(N_WORDS)]
        self.letters = {letter: N_WORDS + n for n, letter in enumerate("0123456789 ")}
        pieces = {n: word.encode() for n, word in enumerate(self.words)}
        pieces |= {n: c.encode() for c, n in self.letters.items()}
        self.text = TokenText(pieces.get)

    def encode(self, text: str, **_: Any) -> list[int]:
        return [int(text[n : n + 5]) for n in range(0, len(text), 5)]

    def spelled(self, ids: list[int], place: int) -> list[int]:
        """Return ids with the word at `place` in letters before its id."""
        return [*ids[:place], *map(self.letters.__getitem__, self.words[ids[place]]), *ids[place:]]


def stored_chain(store: BlockStore, model: LoadedModel, ids: list[int]) -> None:
    assert model.text is not None
    parent, entries = model.root.key, []
    for start in range(0, len(ids), BLOCK_TOKENS):
        block_ids = ids[start : start + BLOCK_TOKENS]
        packed = pack_ids(block_ids)
        block = Block(
            block_key(parent, packed), parent, start, packed, model.text.decode(block_ids)
        )
        forms = model.spec.block_arrays(len(block_ids))
        entries.append((block, {name: mx.zeros(shape, dtype) for name, shape, dtype in forms}))
        parent = block.key
    mx.eval([arrays for _, arrays in entries])
    blocks = tuple(block for block, _ in entries)
    store.commit(Commit(model.root, blocks), entries)
    store.drain()


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=131_072, help="length of the conversation")
    parser.add_argument("--requests", type=int, default=5)
    asked = parser.parse_args()
    words = Words()
    computed: Any = tiny_model()
    spec = probe_model(computed)
    model = LoadedModel(computed, words, spec, "lookup-cost", words.text)
    ids = [n * 37 % N_WORDS for n in range(asked.tokens)]
    spelled = words.spelled(ids, asked.tokens // 2)[: asked.tokens // 2 + 5]
    prompt_ids = [*spelled, *ids[asked.tokens // 2 + 1 :], 1, 2, 3]
    times: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        store = BlockStore(Path(folder), StoreLimits(1 << 32, 1 << 34))
        with closing(store):
            stored_chain(store, model, ids)
            memory = Memory(1 << 36, 0, store, model)
            serving = Serving(store, model, lambda *_: None, False, 0.1, memory)
            for number in range(2 * asked.requests):
                sent = SimpleNamespace(request_type="text", prompt="", messages=[])
                request, prompt = ClientRequest(sent), Prompt(prompt_ids, [prompt_ids], ["user"])
                started = time.thread_time()
                serving.look_up(RequestState.of(request), prompt)
                ahead = time.thread_time()
                served = ServedRequest(serving, request, prompt)
                served.advance()
                taken = time.thread_time()
                is_changed = number % 2 > 0
                if is_changed:
                    stored_chain(store, model, [n % N_WORDS for n in range(number, number + 300)])
                begun = time.thread_time()
                prepared = served.enter()
                ended = time.thread_time()
                assert prepared.n_cached == asked.tokens, prepared.n_cached
                name = "after another commit" if is_changed else "in an unchanged store"
                times.setdefault("the lookup, on an HTTP thread", []).append(ahead - started)
                times.setdefault(f"before the restore, {name}", []).append(taken - ahead)
                times.setdefault(f"the restore, {name}", []).append(ended - begun)
    for name, seconds in times.items():
        print(f"{name}: {median(seconds) * 1e3:.1f} ms")


if __name__ == "__main__":
    main()
