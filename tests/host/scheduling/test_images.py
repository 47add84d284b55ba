"""Images of a prompt: the ids that distinguish them, and the model's caches."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import KVCache

from mlx_lm_kvpersist.block import pack_ids
from mlx_lm_kvpersist.host.hooks import Prompt
from mlx_lm_kvpersist.host.manager import Taken, TakenTokens
from mlx_lm_kvpersist.host.scheduling.images import fed_images, with_images
from mlx_lm_kvpersist.host.scheduling.prefill import plugin_stream_generate
from mlx_lm_kvpersist.image_ids import GOES_ON
from mlx_lm_kvpersist.match import TokenText, match_prompt
from tests.match.tree_in_memory import ROOT, MemoryTree

from .test_prefill import Counting, Saving, keys_of
from .test_response_generator import Vision
from .test_single import Single

PATCH = 7
SIDE = 4
"""The width and the height of a token, in pixels."""


def rendered(*parts: list[int] | mx.array) -> tuple[list[int], Vision]:
    """Return stock's ids and images of a prompt. An image has a row for each token."""
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


def test_images_that_differ_in_one_pixel_never_match() -> None:
    """Differences that resizing removes are not tested: the model gets the same pixels then."""
    module = pytest.importorskip("mlx_lm.processors.muse_spark")
    process = module.Processor(patch_size=SIDE // 2)
    rng = np.random.default_rng(5)
    stored = rng.integers(1, 255, (4 * SIDE, 6 * SIDE, 3), dtype=np.uint8)

    def ids_of(image: Any) -> list[int]:
        pixels, n_tokens = process.preprocess_image(image)
        vision = Vision([pixels], [1], [5, *[-5] * n_tokens])
        return [*with_images([5, *[PATCH] * n_tokens], vision), 6]

    tree = MemoryTree(TokenText({5: b"a", 6: b"b"}.get), block_tokens=8)
    tree.add(ids_of(stored))
    first_ids = set()
    for number in range(1000):
        image = stored.copy()
        image.flat[number] ^= 1
        ids = ids_of(image)
        first_ids.add(ids[1])
        assert match_prompt(tree, ROOT, pack_ids(ids)).n_tokens == 1
    assert len(first_ids) == 1000
    assert match_prompt(tree, ROOT, pack_ids(ids_of(stored.copy()))).n_tokens == 26


def test_image_id_depends_on_the_shape_and_on_every_number() -> None:
    square = mx.arange(36, dtype=mx.float32).reshape(4, 3, 3)
    variants = [square.reshape(4, 9), square + 1e-6, square.astype(mx.bfloat16), square[:, ::-1]]
    image_ids = [with_images(*rendered([1], x, [2]))[1] for x in (square, *variants)]
    assert len(set(image_ids)) == len(image_ids) - 1  # bfloat16 can hold these numbers
    assert with_images(*rendered([1], square, [2])) == [1, image_ids[0], *[GOES_ON] * 3, 2]


class ImageModel(Counting):
    """A model whose keys are the ids of text tokens and the numbers in the rows of images."""

    def __init__(self) -> None:
        super().__init__()
        self.n_encoded = 0

    def embed_inputs(self, ids: mx.array, *, pixel_values: list[mx.array]) -> mx.array:
        self.n_encoded += len(pixel_values)
        rows = iter([number for pixels in pixel_values for number in numbers(pixels)])
        embedded = [next(rows) if token == PATCH else token for token in numbers(ids)]
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
    values: Any = array.flatten().tolist()
    return list(values)


def image(first: int, n_tokens: int) -> mx.array:
    return mx.arange(first, first + n_tokens).reshape(-1, 1)


PARTS: list[list[int] | mx.array] = [
    list(range(1000, 1030)),
    image(2000, 150),
    [1100, 1101],
    image(3000, 20),
    [1200] * 60,
    image(4000, 1),
    list(range(1300, 1330)),
]
KEYS = [key for part in PARTS for key in (part if isinstance(part, list) else numbers(part))]


def compute(max_chunk: int, n_cached: int = 0, caches: Any = None) -> tuple[Any, Any, list[int]]:
    """Compute a single prompt with images; return the test's `Single`, the caches and the keys."""
    single: Any = Single(max_chunk)
    ids, vision = rendered(*PARTS)
    single.model = ImageModel()
    single.limited()
    keys = with_images(ids, vision)
    prompt = Prompt(keys, [keys], ["user"])
    taken = Taken("saves", Saving(single.plugin, prompt), n_cached=n_cached, prompt=prompt)
    taken.images, fed = fed_images(TakenTokens(keys, taken), ids, vision)
    n_images = sum(start < n_cached for start in fed.starts)
    rest = TakenTokens(taken.images, taken)[n_cached:]
    options: dict[str, Any] = {
        "model": single.model,
        "prompt": rest,
        "prompt_cache": caches or [KVCache()],
        # Stock embeds only the images that are not cached.
        "input_embeddings": single.model.embed_inputs(
            mx.array(rest), pixel_values=fed.pixel_values[n_images:]
        ),
        "prompt_progress_callback": lambda *progress: None,
        "prefill_step_size": 2048,
    }
    list(plugin_stream_generate(single.stock)(**options))
    return single, single.options["prompt_cache"], keys


@pytest.mark.parametrize("max_chunk", [16, 64, 2048])
def test_chunks_may_end_inside_images(max_chunk: int) -> None:
    single, caches, keys = compute(max_chunk)
    assert keys_of(caches)[: len(KEYS) - 1] == KEYS[:-1]
    assert single.options["prompt"] == KEYS[-1:]
    assert single.options["input_embeddings"].flatten().tolist() == KEYS[-1:]
    for *_, saved, computed in single.plugin.saved:
        assert saved == keys[: len(saved)] and computed[: len(saved)] == KEYS[: len(saved)]


def test_cached_images_are_not_encoded_again() -> None:
    _, before, _ = compute(64)
    n_cached = 180
    before[0].trim(before[0].offset - n_cached)
    single, caches, _ = compute(64, n_cached, before)
    assert keys_of(caches)[: len(KEYS) - 1] == KEYS[:-1]
    assert single.model.n_encoded == 2
