"""A model that the server has loaded is made ready: its caches probed, its speed measured.

Generation thread.
"""

from __future__ import annotations

import logging
import weakref
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ..cache.blocks.canary import warm_up
from ..cache.geometry.fingerprint import local_path, model_fingerprint
from ..cache.geometry.on_grid import end_on_grid
from ..cache.geometry.precision import PrecisionChoice, layout_in_words
from ..cache.geometry.spec import Batching, ModelCacheSpec
from ..cache.live.attention import Strategy
from ..cache.measuring.calibration import with_plans
from ..cache.measuring.guard import Verdict, is_guarded, known_verdict
from ..cache.measuring.persisted import hash_once
from ..cache.measuring.prefill_memory import measure_prefill
from ..errors import ModelNotSupported
from ..match.text import TokenText
from ..store.block_store import BlockStore
from ..units import show_bytes
from .model import LoadedModel, Speed

logger = logging.getLogger(__name__)

_BATCHING = {
    Batching.REPLIES: "replies in batches",
    Batching.NONE: "one request at a time",
}


def prepare(
    provider: Any,
    store: BlockStore,
    choice: PrecisionChoice,
    attention: Strategy | Literal["auto"],
    max_prefill_bytes: int,
    *,
    with_text: bool,
) -> LoadedModel:
    """Return what is known of the model that the provider has loaded, and log it.

    What is measured of it is persisted in the store's index. with_text: whether its prompts may be
    stored as text. max_prefill_bytes: what a chunk of a prompt may take beside model and caches.
    Raises ModelNotSupported where its conversations cannot be kept.
    """
    model_path, adapter_path, draft_path = provider.model_key
    if draft_path is not None:
        raise ModelNotSupported("a draft model is in use")
    fingerprint = model_fingerprint(
        local_path(model_path),
        Path(adapter_path) if adapter_path else None,
        partial(hash_once, store.view.state),
    )
    verdict = None
    if is_guarded(choice):
        verdict = known_verdict(store.view.state, fingerprint, choice)
        choice = verdict.choice(choice) if verdict else choice
    spec = ModelCacheSpec.probe(provider.model, choice)
    spec = with_plans(provider.model, spec, store.view.state, attention)
    warm_up(provider.model, spec)
    if spec.reads_arrays:
        end_on_grid(provider.model)
    speed = Speed(measure_prefill(provider.model, spec, max_prefill_bytes))
    text = TokenText.of(provider.tokenizer) if with_text else None
    if text is None and with_text:
        logger.warning("kvpersist: this tokenizer's prompts are matched by ids, not by text")
    logger.info("kvpersist: %s: %s; %s", model_path, described(spec, verdict), places(store))
    for group in spec.full:
        if group.precision is None and not choice.is_full_precision:
            logger.warning(
                "kvpersist: %d of its layers stay in full precision: %s",
                len(group.slots),
                group.why,
            )
    model = weakref.proxy(provider.model)
    name = str(model_path)
    return LoadedModel(model, provider.tokenizer, spec, fingerprint, text, name, speed, verdict)


def places(store: BlockStore) -> str:
    """Return where conversations are kept and how much space they take, for the log."""
    ram = show_bytes(store.limits.max_ram_bytes)
    return f"conversations in {store.disk.files}, and up to {ram} of RAM"


def described(spec: ModelCacheSpec, verdict: Verdict | None = None) -> str:
    """Return how full layers are stored, batched and attended, for the log."""
    plans = {
        f"prefill {p.prefill}, decode {p.decode}, batches {p.batch_decode}"
        for p in spec.plans.values()
    }
    attention = f"attention: {' or '.join(sorted(plans))}" if plans else "attention as in mlx-lm"
    found = f"{show_bytes(spec.bytes_per_token)} a token, {layout_in_words(spec.layout)}"
    if any(group.precision for group in spec.full):
        own_bytes = sum(group.full_precision_bytes for group in spec.full)
        found += (
            f" ({spec.bits_per_number:.1f} on average with scales), "
            f"{spec.bytes_per_token / own_bytes:.2f} of full memory"
        )
    judged = f"; {verdict}" if verdict else ""
    return f"{found}{judged}; {_BATCHING[spec.batching]}, {attention}"
