"""A model that the server has loaded is made ready: its caches probed, their precision chosen.

Generation thread.
"""

from __future__ import annotations

import logging
import time
import weakref
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx

from ..cache.blocks.canary import warm_up
from ..cache.geometry.fingerprint import content_hash, local_path, model_fingerprint
from ..cache.geometry.on_grid import end_on_grid
from ..cache.geometry.precision import Allocation, PrecisionRequest, layout_in_words
from ..cache.geometry.spec import Batching, ModelCacheSpec
from ..cache.live.attention import Strategy
from ..cache.measuring.allocation import chosen_spec, measure, unmeasured
from ..cache.measuring.calibration import with_plans
from ..cache.measuring.persisted_allocation import known_allocation, put_allocation, suits
from ..cache.measuring.prefill_memory import measure_prefill
from ..cache.measuring.sample import sample_ids
from ..errors import ModelNotSupported
from ..match.text import TokenText
from ..store.block_store import BlockStore
from ..units import show_bytes
from .model import LoadedModel, Speed

logger = logging.getLogger(__name__)

_LOG_EVERY_S = 5.0
"""Between two lines of progress."""

_BATCHING = {
    Batching.REPLIES: "replies in batches",
    Batching.NONE: "one request at a time",
}


def prepare(
    provider: Any,
    store: BlockStore,
    request: PrecisionRequest,
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
        lambda path: _content_hash(store, path),
    )
    spec, allocation = chosen_spec(
        provider.model,
        request,
        lambda spec: _allocation(provider, spec, fingerprint, request, store),
    )
    spec = with_plans(provider.model, spec, store.view.state, attention)
    warm_up(provider.model, spec)
    if spec.reads_arrays:
        end_on_grid(provider.model)
    speed = Speed(measure_prefill(provider.model, spec, max_prefill_bytes))
    text = TokenText.of(provider.tokenizer) if with_text else None
    if text is None and with_text:
        logger.warning("kvpersist: this tokenizer's prompts are matched by ids, not by text")
    about = described(spec, allocation)
    logger.info("kvpersist: %s: %s; %s", model_path, about, places(store))
    for group in spec.full:
        if group.precision is None and not request.is_full_precision:
            logger.warning(
                "kvpersist: %d of its layers stay in full precision: %s",
                len(group.slots),
                group.why,
            )
    model = weakref.proxy(provider.model)
    return LoadedModel(model, provider.tokenizer, spec, fingerprint, text, str(model_path), speed)


def places(store: BlockStore) -> str:
    """Return where conversations are kept and how much space they take, for the log."""
    ram = show_bytes(store.limits.max_ram_bytes)
    return f"conversations in {store.disk.files}, and up to {ram} of RAM"


def _allocation(
    provider: Any,
    spec: ModelCacheSpec,
    fingerprint: str,
    request: PrecisionRequest,
    store: BlockStore,
) -> Allocation:
    """Return the precision of each layer: as chosen before, else measured now."""
    known = known_allocation(store.view.state, fingerprint, request)
    if known is not None and suits(known, spec, request):
        return known
    logged_s = time.monotonic()

    def on_progress(n_done: int, n_runs: int) -> None:
        nonlocal logged_s
        if time.monotonic() - logged_s > _LOG_EVERY_S:
            logged_s = time.monotonic()
            logger.info("kvpersist: measuring precision: %d of about %d runs", n_done, n_runs)

    logger.info("kvpersist: measuring once which precision this model bears")
    try:
        found = measure(provider.model, spec, sample_ids(provider.tokenizer), request, on_progress)
    except Exception as error:
        # It may lack memory, or run in the server alone. Nothing of it is persisted.
        logger.warning("kvpersist: its precision could not be measured: %r", error)
        return unmeasured(spec, request)
    finally:
        mx.clear_cache()
    if found.cut_at_s is not None:
        logger.warning(
            "kvpersist: %g s were not enough to measure every layer alone; with more "
            "(--kvpersist-kv-measure-s) it is measured again, and may take fewer bits",
            found.cut_at_s,
        )
    theirs = known_allocation(store.view.state, fingerprint, request)
    if theirs is not None and suits(theirs, spec, request):
        return theirs  # another server was quicker
    put_allocation(store.view.state, fingerprint, request, found)
    return found


def _content_hash(store: BlockStore, path: Path) -> str:
    """Hash a file once: weights are gigabytes, and when they change, so does their stamp."""
    stat = path.stat()
    stamp = f"{stat.st_size}:{stat.st_mtime_ns}:{stat.st_ino}"
    match store.view.state.get(f"hash/{path}"):
        case [str(then), str(known)] if then == stamp:
            return known
    logger.info("kvpersist: reading %s once, to tell models apart", path.name)
    found = content_hash(path)
    store.view.state.put(f"hash/{path}", [stamp, found])
    return found


def described(spec: ModelCacheSpec, allocation: Allocation | None = None) -> str:
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
    if allocation is not None and allocation.divergence is not None:
        found += (
            f"; predicted divergence {allocation.divergence.value:.2g} "
            f"(measured on {allocation.measured_on})"
        )
    return f"{found}; {_BATCHING[spec.batching]}, {attention}"
