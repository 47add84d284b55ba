"""Images of a prompt: the ids that tell them apart, and what the model computes of them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

from mlx_lm_kvpersist.block import pack_ids
from mlx_lm_kvpersist.errors import ClientGone
from mlx_lm_kvpersist.host.answers import PrefillLimits, Prompt
from mlx_lm_kvpersist.host.manager import Taken, TakenTokens
from mlx_lm_kvpersist.host.scheduling.images import GOES_ON, Images, with_images
from mlx_lm_kvpersist.host.scheduling.single_prompt import SinglePrompt
from mlx_lm_kvpersist.match.text import TokenText
from mlx_lm_kvpersist.match.tree import match_prompt
from tests.match.tree_in_memory import ROOT, MemoryTree

from .test_prefill import Counting, Saving, keys_of
from .test_response_generator import Vision
from .test_single_prompt import Single

PATCH = 7
SIDE = 4
"""Pixels of a token's side."""


def rendered(*parts: list[int] | mx.array) -> tuple[list[int], Vision]:
    """Return a prompt of texts and images, as stock has it. An image has a row for each token."""
    ids: list[int] = []
    vision = Vision([], [], [])
    for part in parts:
        if isinstance(part, list):
            ids, vision.cache_key = [*ids, *part], [*vision.cache_key, *part]
            continue
        vision.pixel_values.append(part)
        vision.starts.append(len(ids))
        ids += [PATCH] * len(part)
        vision.cache_key += [-5] * len(part)
    return ids, vision


def test_images_that_differ_in_one_pixel_are_never_taken_for_each_other() -> None:
    """Where resizing leaves nothing of the difference, the model is given the same."""
    module = pytest.importorskip("mlx_lm.processors.muse_spark")
    process = module.Processor(patch_size=SIDE // 2)
    rng = np.random.default_rng(5)
    stored = rng.integers(1, 255, (4 * SIDE, 6 * SIDE, 3), dtype=np.uint8)

    def ids_of(image: Any) -> list[int]:
        pixels, n_tokens = process.preprocess_image(image)
        vision = Vision([pixels], [1], [5, *[-5] * n_tokens])
        return [*with_images([5, *[PATCH] * n_tokens], vision), 6]

    tree = MemoryTree(TokenText({5: b"a", 6: b"b"}), block_tokens=8)
    tree.add(ids_of(stored))
    found = set()
    for number in range(1000):
        image = stored.copy()
        image.flat[number] ^= 1
        ids = ids_of(image)
        found.add(ids[1])
        assert match_prompt(tree, ROOT, pack_ids(ids)).n_tokens == 1
    assert len(found) == 1000
    assert match_prompt(tree, ROOT, pack_ids(ids_of(stored.copy()))).n_tokens == 26


def test_the_shape_and_every_number_of_an_image_count() -> None:
    square = mx.arange(36, dtype=mx.float32).reshape(4, 3, 3)
    others = [square.reshape(4, 9), square + 1e-6, square.astype(mx.bfloat16), square[:, ::-1]]
    names = [with_images(*rendered([1], one, [2]))[1] for one in (square, *others)]
    assert len(set(names)) == len(names) - 1  # these numbers are the same in bfloat16
    assert with_images(*rendered([1], square, [2])) == [1, names[0], *[GOES_ON] * 3, 2]


class Seeing(Counting):
    """Its keys are the ids of texts, and of an image the numbers in its rows."""

    def __init__(self) -> None:
        super().__init__()
        self.n_encoded = 0

    def embed_inputs(self, ids: mx.array, *, pixel_values: list[mx.array]) -> mx.array:
        self.n_encoded += len(pixel_values)
        rows = iter([number for one in pixel_values for number in numbers(one)])
        embedded = [next(rows) if one == PATCH else one for one in numbers(ids)]
        assert next(rows, None) is None
        return mx.array(embedded, dtype=mx.float32)[:, None]

    def __call__(self, ids: mx.array, cache: list[Any], input_embeddings: Any = None) -> mx.array:
        if input_embeddings is not None:
            assert input_embeddings.shape[:2] == ids.shape
            ids = input_embeddings[..., 0].astype(mx.int32)
        else:
            assert PATCH not in numbers(ids), "an image was read as text"
        return super().__call__(ids, cache)


def numbers(array: mx.array) -> list[int]:
    found: Any = array.flatten().tolist()
    return list(found)


def image(first: int, n_tokens: int) -> mx.array:
    return mx.arange(first, first + n_tokens).reshape(-1, 1)


TALK: list[list[int] | mx.array] = [
    list(range(1000, 1030)),
    image(2000, 150),
    [1100, 1101],
    image(3000, 20),
    [1200] * 60,
    image(4000, 1),
    list(range(1300, 1330)),
]
READ = [one for part in TALK for one in (part if isinstance(part, list) else numbers(part))]


def single(most: int, n_cached: int = 0) -> tuple[Any, ...]:
    """Return a prompt with images that is served by itself, its tokens and its caches."""
    one, (ids, vision) = Single(), rendered(*TALK)
    one.model, one.plugin.limits = Seeing(), PrefillLimits(1.0, lambda position: most)
    one.plugin.limit(one.model)
    one.model.make_cache.make = lambda: [KVCache()]
    known = with_images(ids, vision)
    prompt = Prompt(known, [known], ["user"])
    taken = Taken("saves", Saving(one.plugin, prompt), n_cached=n_cached, prompt=prompt)
    tokens = TakenTokens(known, taken)
    taken.images = Images.of(tokens, ids, vision)
    return one, tokens, SinglePrompt([one.model], one.reply, 2048)


@pytest.mark.parametrize("most", [16, 64, 2048])
def test_chunks_cut_images_and_each_is_computed_once(most: int) -> None:
    one, tokens, prompt = single(most)
    caches, rest = prompt.compute(tokens, None)
    n_done = len(tokens) - len(rest)
    assert keys_of(caches)[:n_done] == READ[:n_done]
    assert (n_done, one.model.n_encoded) == (len(READ) - 1, 3)
    for *_, known, keys in one.plugin.saved:
        assert known == tokens[: len(known)] and keys[: len(known)] == READ[: len(known)]


def test_an_image_that_is_cached_is_not_computed() -> None:
    one, tokens, prompt = single(64)
    before, _ = prompt.compute(tokens, None)
    n_cached = 180
    before[0].trim(before[0].offset - n_cached)
    one, tokens, prompt = single(64, n_cached)
    caches, _ = prompt.compute(tokens, before)
    assert keys_of(caches)[: len(READ) - 1] == READ[:-1]
    assert one.model.n_encoded == 2


def test_what_was_computed_of_an_image_is_kept_when_its_client_leaves() -> None:
    one, tokens, prompt = single(64)
    save = one.plugin.saved.append

    def leave(saved: Any) -> None:
        save(saved)
        one.client.client_gone = True

    one.plugin.saved = SimpleNamespace(append=leave)
    with pytest.raises(ClientGone):
        prompt.compute(tokens, None)
    assert one.model.computed == [[64]] and one.model.n_encoded == 1
