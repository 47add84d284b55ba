"""Conversations with images can be cut at any position, but never inside an image."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import mlx.core as mx
import pytest

from mlx_lm_kvpersist.cache.geometry.precision import PrecisionChoice
from mlx_lm_kvpersist.cache.geometry.spec import probe_model
from mlx_lm_kvpersist.image_ids import GOES_ON, before_image, first_id
from mlx_lm_kvpersist.request.model import LoadedModel
from mlx_lm_kvpersist.request.outcome import Reason
from mlx_lm_kvpersist.store.block_store import BlockStore, StoreLimits
from mlx_lm_kvpersist.store.records import DISK
from tests.support.pairs import every_pair

from .conftest import Conversations
from .test_lookup import TOLERANCE


def image(number: int, n_tokens: int) -> list[int]:
    digest = sha256(bytes([number])).digest()
    return [first_id(digest), *[GOES_ON] * (n_tokens - 1)]


def text(first: int, n_tokens: int) -> list[int]:
    return [(first + i * 37) % 250 + 300 for i in range(n_tokens)]


IDS = [*text(0, 90), *image(0, 60), *text(1, 110), *image(1, 263), *text(2, 25), *image(2, 1)]
IDS += [*text(3, 151), *image(3, 12), *text(4, 100)]
"""Images end at 150, 523, 549 and 712; the second image crosses the end of a block."""


pytestmark = pytest.mark.parametrize("loaded", ["byte-level"], indirect=True)


@dataclass
class ImageConversations(Conversations):
    """An image's first id is fed as a token of this image, each further id as the same token."""

    def forward(self, ids: list[int], caches: list[Any]) -> mx.array:
        return super().forward([i if i >= 0 else 5 + -i % 200 for i in ids], caches)


PRECISIONS = {"default": PrecisionChoice(), "16": PrecisionChoice(16, 16)}


@pytest.fixture(scope="module")
def talks(
    loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, ImageConversations]]:
    """A conversation that was stored in each precision."""
    with ExitStack() as stack:
        made = {}
        for name, choice in PRECISIONS.items():
            store = BlockStore(tmp_path_factory.mktemp(name), StoreLimits(1 << 30, 1 << 30))
            stack.callback(store.close)
            spec = probe_model(loaded.model, choice)
            made[name] = ImageConversations(replace(loaded, spec=spec), store)
            made[name].remember(IDS, n_prompt=760)
        yield made


@pytest.fixture(params=PRECISIONS)
def talk(
    request: pytest.FixtureRequest, talks: dict[str, ImageConversations]
) -> ImageConversations:
    return talks[request.param]


CUTS = [50, 89, 90, 150, 151, 257, 261, 400, 512, 523, 524, 530, 548, 549, 600, 712, 713, 767, 811]


@every_pair(
    is_hot=[True, False],
    cut=CUTS,
    talk=list(PRECISIONS),
    indirect=["talk"],
)
def test_a_restored_prompt_has_the_logits_of_a_computed_prompt(
    talk: ImageConversations, cut: int, is_hot: bool
) -> None:
    if not is_hot:
        talk.forget_hot_blocks()
    cut = before_image(IDS, cut)
    prompt = [*IDS[:cut], *image(9, 30), 7, 8]
    fed, caches, outcome = talk.ask(prompt)
    assert fed == prompt
    n_reused = outcome.n_reused
    assert n_reused == before_image(IDS, n_reused) and n_reused <= cut
    if not talk.loaded.spec.quantized or cut >= 768:  # the unfinished block is in full precision
        assert n_reused == cut and (is_hot or outcome.tier == DISK)
    else:  # the third block begins inside an image, so perhaps only the first block
        assert n_reused >= (256 if cut >= 256 else 0)
    assert outcome.reason not in (Reason.EVICTED, Reason.DAMAGED)
    restored = talk.forward(fed[n_reused:], caches)
    computed = talk.forward(fed, talk.loaded.spec.make_cache())
    assert float(mx.abs(restored - computed).max()) < TOLERANCE


def test_reuse_ends_before_a_different_image(talk: ImageConversations) -> None:
    first = IDS.index(image(1, 1)[0])
    prompt = [*IDS[:first], *image(8, 263), *IDS[first + 263 :]]
    talk.forget_hot_blocks()
    fed, _, outcome = talk.ask(prompt)
    assert fed == prompt
    assert outcome.n_reused == (256 if talk.loaded.spec.quantized else first)


def test_images_are_restored_from_disk_with_the_text_after_them(talk: ImageConversations) -> None:
    talk.forget_hot_blocks()
    _, caches, outcome = talk.ask([*IDS, 7, 8])
    assert outcome.n_reused == len(IDS) and outcome.tier == DISK
    assert all(cache.size() == len(IDS) for cache in caches)
