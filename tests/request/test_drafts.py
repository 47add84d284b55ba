"""Conversations with a draft model: the caches that mlx-lm's speculative loop leaves are stored."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step, speculative_generate_step
from mlx_lm.utils import load

from mlx_lm_kvpersist.cache.geometry.kinds import slots_of
from mlx_lm_kvpersist.cli.quality_checks import server_attention
from mlx_lm_kvpersist.config import KV_BITS
from mlx_lm_kvpersist.errors import ModelNotSupported
from mlx_lm_kvpersist.host.hooks import REPLY, ClientRequest, ModelSupport, Prompt
from mlx_lm_kvpersist.host.manager import Taken, TakenTokens
from mlx_lm_kvpersist.host.scheduling.model_provider import PluginCaches
from mlx_lm_kvpersist.host.scheduling.prefill import plugin_stream_generate
from mlx_lm_kvpersist.request.lookup import Lookup
from mlx_lm_kvpersist.request.memory import Memory
from mlx_lm_kvpersist.request.model import LoadedModel, ModelOptions, load_model
from mlx_lm_kvpersist.request.serving import ServedRequest, Serving
from mlx_lm_kvpersist.store.block_store import BlockStore
from tests.support import make_tiny_model, make_zoo_model
from tests.support.drafts import make_draft

from .conftest import store_in


@pytest.fixture(scope="module", autouse=True)
def patched() -> Iterator[None]:
    with server_attention():
        yield


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A model, and two drafts."""
    folder = tmp_path_factory.mktemp("drafts")
    return with_drafts(make_tiny_model(folder / "model"))


def with_drafts(model: Path) -> list[str]:
    return [str(model), *(str(make_draft(model, model.parent / f"draft-{n}", n)) for n in range(2))]


def make_provider(model: str, draft: str | None) -> Any:
    loaded, tokenizer = load(model)
    draft_model = load(draft)[0] if draft else None
    return SimpleNamespace(
        model=loaded, tokenizer=tokenizer, draft_model=draft_model, model_key=(model, None, draft)
    )


def generated(*, model: Any, draft_model: Any, prompt: list[int], **options: Any) -> Iterator[Any]:
    """Yield the steps from which mlx-lm's `stream_generate` makes responses."""
    given = {name: options[name] for name in ("max_tokens", "prompt_cache")}
    if draft_model is None:
        yield from generate_step(mx.array(prompt), model, **given)
        return
    given["num_draft_tokens"] = options["num_draft_tokens"]
    yield from speculative_generate_step(mx.array(prompt), model, draft_model, **given)


class Server:
    """Serves a model with a store, with or without a draft model, without HTTP."""

    def __init__(self, paths: tuple[str, str | None], store: BlockStore, bits: str) -> None:
        self.provider, self.store = make_provider(*paths), store
        # Not rotated, else one number that is rounded differently would change its whole head.
        options = ModelOptions(
            replace(KV_BITS[bits], rotated=False), "dequantize", 1 << 30, with_text=False
        )
        self.loaded = loaded = load_model(self.provider, options)
        memory = Memory(1 << 30, 0, store, loaded)
        self.serving = Serving(store, loaded, lambda *_: None, False, 0.1, memory)
        models = (self.provider.model, loaded), (self.provider.draft_model, loaded.draft)
        for model, loaded_model in models:
            if loaded_model is not None:
                support = ModelSupport(
                    loaded_model.spec.make_cache, limits=loaded_model.speed.limits(0.1)
                )
                model.make_cache = PluginCaches(model, "kvpersist", support)
        self.n_reused: list[int] = []

    def turn(self, ids: list[int], max_tokens: int, stop_at: int, n_drafted: int = 3) -> list[int]:
        """Serve a prompt as stock does, up to a stop; return the reply."""
        sent = ClientRequest(SimpleNamespace(request_type="text", prompt="", messages=[]))
        prompt = Prompt(ids, [ids], ["user"])
        taken = Taken("kvpersist", ServedRequest(self.serving, sent, prompt))
        assert taken.enter() == prompt
        both = (taken, taken.draft)
        self.n_reused = [model.n_cached for model in both if model is not None]
        caches = list(taken.caches or [None])
        steps = plugin_stream_generate(generated)(
            model=self.provider.model,
            draft_model=self.provider.draft_model,
            num_draft_tokens=n_drafted,
            max_tokens=max_tokens,
            prompt=TakenTokens(ids, taken)[taken.n_cached :],
            prompt_cache=caches,
            prompt_progress_callback=lambda *progress: None,
            prefill_step_size=2048,
        )
        reply: list[int] = []
        self.n_accepted = 0
        for token, _, *is_drafted in steps:
            reply.append(token)
            self.n_accepted += sum(is_drafted)
            if len(reply) == stop_at:
                break
        steps.close()
        taken.insert([*ids, *reply], caches, REPLY)
        return reply

    def check(self, ids: list[int], min_reused: int) -> None:
        """Compare the stored caches of ids with a cold computation."""
        models = (self.provider.model, self.loaded), (self.provider.draft_model, self.loaded.draft)
        for model, loaded_model in models:
            if loaded_model is not None:
                self._check(model, loaded_model, ids, min_reused)

    def _check(
        self, model: Any, loaded_model: LoadedModel, ids: list[int], min_reused: int
    ) -> None:
        extended = [*ids, 5, 5]  # more tokens, so that all ids can be restored
        lookup = Lookup(
            Prompt(extended, [extended], ["user"]), loaded_model.root, self.store, loaded_model
        )
        reuse = lookup.restore()
        n_tokens = reuse.outcome.n_reused
        assert min_reused <= n_tokens <= len(ids)
        if reuse.caches is None:
            return
        cold = loaded_model.spec.make_cache()
        model(mx.array([ids[:n_tokens]]), cache=cold)
        for restored, computed in zip(slots_of(reuse.caches), slots_of(cold), strict=True):
            if loaded_model.spec.quantized:
                restored.plan = computed.plan = None  # then the cache returns arrays
                computed.forget()  # a block that just ended is not packed yet
                both = [slot.keys_and_values() for slot in (restored, computed)]
            else:
                both = [(slot.keys, slot.values) for slot in (restored, computed)]
            for stored, expected in zip(*both, strict=True):
                stored, expected = stored[:, :, :n_tokens], expected[:, :, :n_tokens]
                most, share = (1e-3, 1e-3) if loaded_model.spec.quantized else (1e-5, 0.0)
                far: Any = mx.abs(stored - expected) > most * mx.abs(expected).max()
                # A number between two quantization steps may be rounded to either.
                assert far.mean().item() <= share


def random_ids(rng: random.Random, n: int) -> list[int]:
    return [rng.randrange(10, 500) for _ in range(n)]


@pytest.mark.parametrize("n_turns", [4, pytest.param(150, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("family", "bits"), [("llama", "16"), ("llama", "k6v4"), ("deepseek_v3", "k6v4")]
)
def test_stopped_replies_store_only_tokens_that_the_caches_have(
    paths: list[str], tmp_path: Path, family: str, bits: str, n_turns: int
) -> None:
    """The next reply is the same as without a draft model, and all of this turn is reused.

    Half of the replies cross the end of a block. One family reads packed keys, the other reads
    arrays.
    """
    if family != "llama":
        paths = with_drafts(make_zoo_model(tmp_path / "model", family))
    rng, store = random.Random(7), store_in(tmp_path / "store")
    drafted, plain = (Server((paths[0], draft), store, bits) for draft in (paths[1], None))
    assert drafted.loaded.root == plain.loaded.root
    n_accepted = 0
    for n in range(n_turns):
        ids = random_ids(rng, rng.randrange(2, 600) if n % 2 else rng.randrange(248, 256))
        max_tokens, stop_at = rng.randrange(1, 30), rng.randrange(1, 30)
        reply = drafted.turn(ids, max_tokens, stop_at, n_drafted=1 + n % 5)
        n_accepted += drafted.n_accepted
        whole = [*ids, *reply]
        drafted.check(whole, len(whole) - len(reply) - 1 if bits == "16" else 0)
        more = [*whole, *random_ids(rng, 9)]
        expected = plain.turn(more, 8, 8)
        assert len(whole) - plain.n_reused[0] <= (1 if bits == "16" else 256)
        assert drafted.turn(more, 8, 8) == expected
        assert all(n >= len(whole) - (2 if bits == "16" else 256) for n in drafted.n_reused)
    assert n_accepted > n_turns
    store.close()


def test_a_new_or_outdated_draft_model_computes_its_missing_tokens(
    paths: list[str], tmp_path: Path
) -> None:
    """The target's tokens are reused; the draft model alone computes the tokens that it lacks."""
    rng, store = random.Random(3), store_in(tmp_path / "store")
    ids = random_ids(rng, 700)
    plain = Server((paths[0], None), store, "16")
    whole = [*ids, *plain.turn(ids, 10, 10)]
    n_most = len(whole)
    for draft, n_stored in ((paths[1], 0), (paths[2], 0), (paths[1], n_most), (paths[2], n_most)):
        server = Server((paths[0], draft), store, "16")
        more = [*whole, *random_ids(rng, 30)]
        expected = plain.turn(more, 8, 8)
        assert server.turn(more, 8, 8) == expected
        # After another turn with the same draft model, only the common beginning is reused.
        assert server.n_reused[0] >= n_most and n_stored <= server.n_reused[1]
        assert server.n_reused[1] == 0 or n_stored
        server.check([*more, *expected], n_most)
    store.close()


def test_target_and_draft_models_have_different_roots(paths: list[str], tmp_path: Path) -> None:
    store = store_in(tmp_path / "store")
    loaded = [Server((paths[0], draft), store, "16").loaded for draft in paths[1:]]
    roots = {
        model.root.key for target in loaded for model in (target, target.draft) if model is not None
    }
    assert len(roots) == 3
    store.close()


@pytest.mark.parametrize("is_draft", [False, True])
def test_models_whose_caches_cannot_be_trimmed_are_refused(
    paths: list[str], tmp_path: Path, is_draft: bool
) -> None:
    windows = str(make_zoo_model(tmp_path / "windows", "gemma3_text"))
    model_paths = (paths[0], windows) if is_draft else (windows, paths[1])
    options = ModelOptions(KV_BITS["16"], "dequantize", 1 << 30, with_text=True)
    message = "layer 0 of the draft model has a RotatingKVCache, which cannot be trimmed"
    with pytest.raises(
        ModelNotSupported, match=message if is_draft else message.replace("draft ", "")
    ):
        load_model(make_provider(*model_paths), options)


def test_memory_counts_the_caches_of_the_draft_model(paths: list[str], tmp_path: Path) -> None:
    store = store_in(tmp_path / "store")
    needed = []
    for draft in (None, paths[1]):
        memory = Server((paths[0], draft), store, "16").serving.memory
        memory.weigh((), (1000,), None)
        needed.append(memory.live_bytes)
    assert needed[1] == 2 * needed[0]
    store.close()
