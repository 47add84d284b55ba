"""From a prompt to restored caches: match the prompt, read the stored blocks, join and check them.

The HTTP thread of a request usually makes a `Lookup` before the request is queued. The generation
thread makes the other lookups: for prompts with images, for prompts that arrived before their model
was loaded, for requests that begin again, for draft models, and on ranks above 0. The generation
thread restores the caches.

If the store raises an exception, the caller catches it, and the prompt is computed. The store
verifies checksums, the lookup verifies shapes, and the canary verifies values.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Generator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any

from ..block import Block, Checkpoint, Record, Root, pack_ids
from ..cache.blocks import CANARY_TOLERANCE, Joiner, Piece, canary_difference
from ..cache.geometry.spec import arrays_fit, forms_bytes
from ..cache.live.packed import capacity
from ..errors import ClientGone
from ..host.hooks import Prompt
from ..image_ids import before_image
from ..match import NO_MATCH, Match, match_prompt, splice
from ..store.block_store import BlockStore, KVBlock, Prefetch
from ..store.records import RAM, SHARED, Gone
from .model import LoadedModel
from .outcome import COLD, Divergence, Kind, Outcome, Reason, divergence_at, why_not_stored
from .replies import with_ids
from .saver import RestorePoint

logger = logging.getLogger(__name__)

MIN_TOKENS = 16
"""Computing fewer tokens is faster than restoring them, on any device."""

MIN_PREFETCH_BYTES = 8 << 20
"""Fewer bytes are not prefetched: reading takes only as long as one or two steps of replies."""

MIN_STEPWISE_BYTES = 64 << 20
"""Fewer bytes, if they are not prefetched, are joined without pauses for the steps of replies. This
takes only as long as one or two steps."""

MAX_MATCHED_TOKENS = 2048
"""If the store has changed, a longer prompt is matched again only by its ids, without a splice."""

_LOOK_S = 0.1
"""The seconds after which a restore checks again whether its client has left."""


@dataclass(frozen=True, eq=False)
class StoredPrefix:
    """A prompt, and how many of its first ids to restore at most (`n_tokens`).

    The model reads `prompt`. `reason` and `detail` say why no more tokens are used.
    """

    prompt: Prompt
    packed_ids: bytes
    match: Match = NO_MATCH
    n_tokens: int = 0
    reason: Reason | None = None
    detail: str = ""
    divergence: Divergence | None = None


@dataclass
class Reuse:
    """The result of a restore: the prompt to feed, and caches that hold its first tokens.

    `caches` is None if nothing is reused. `chain`: the stored blocks that the caches hold
    completely.
    """

    prompt: Prompt
    outcome: Outcome
    caches: list[Any] | None = None
    chain: list[Block] = field(default_factory=list)


@dataclass(frozen=True)
class _Joined:
    """Caches of `n_tokens`, of which `n_read` were not in RAM. `tier`: the slowest tier read."""

    n_tokens: int = 0
    caches: list[Any] | None = None
    n_read: int = 0
    tier: str = COLD


class Lookup:
    """Matches a prompt with the stored text, and restores caches that hold the prompt's beginning.

    In `prompt`, earlier replies already have the ids that the model produced, if `retokenize` found
    them. With several ranks, each rank restores only the tokens that all ranks can restore. Ranks
    above 0 get rank 0's ids, and restore at most `n_worth` tokens.
    """

    def __init__(
        self,
        prompt: Prompt,
        root: Root,
        store: BlockStore,
        model: LoadedModel,
        *,
        canary: bool = True,
        n_worth: int | None = None,
    ) -> None:
        self.prompt, self.model, self.root = prompt, model, root
        self._store, self._canary, self._n_worth = store, canary, n_worth
        self._others_have_less = False
        tokens = model.text if n_worth is None else None
        self.text = tokens.known_text(prompt.ids) if tokens else None
        """The text of the prompt; None if the prompt is matched by ids."""
        self._prefetch: Prefetch | None = None
        self._pinned: list[KVBlock] = []
        self._steps: Generator[None, None, Reuse] | None = None
        self._reuse: Reuse | None = None
        self._closed = False
        self._spent_s = 0.0
        self._n_quarantined = store.blocks_quarantined  # counted before a prefetch finds damage
        self._planned: tuple[tuple[Any, ...], RestorePoint | None] | None = None
        """The arguments of the last search for a restore point, and the point that was found."""
        self._needed: set[bytes] = set()
        """The keys of all blocks and checkpoints that a restore point needed."""
        self.stored = StoredPrefix(prompt, b"")
        """The prefix that `restore` will use, unless blocks are added or removed."""
        try:
            self.stored = self._find(prompt)
            self._point()
        except Exception:
            if n_worth is None:
                raise
            logger.exception("kvpersist: stored blocks could not be looked up")

    def _find(self, prompt: Prompt) -> StoredPrefix:
        """Match a prompt with the stored text, and splice stored ids into it. O(prompt)."""
        store, tokens, text = self._store, self.model.text, self.text
        packed, nearest, match = pack_ids(prompt.ids), NO_MATCH, None
        self._n_changes = store.n_changes
        if tokens and text is not None:
            source = store.ram_first(self.root.key, text)
            nearest = match = match_prompt(source, self.root.key, text, tokens, packed)
            if match.n_tokens and not packed.startswith(match.packed_ids):
                spliced = splice(prompt.ids, text, match, tokens, self.model.encode)
                match = None
                if spliced is not None:
                    prompt, packed = with_ids(prompt, spliced.ids), pack_ids(spliced.ids)
                    match = replace(nearest, n_tokens=spliced.n_stored)
        match = match or self._by_ids(packed)
        divergence = divergence_at(text or "", nearest, self.prompt.messages)
        stored = StoredPrefix(prompt, packed, divergence=divergence)
        return self._to_use(stored, match if match.n_tokens else nearest, text)

    def _find_again(self) -> StoredPrefix:
        """Match the prompt again, because the store has changed; match a long prompt by its ids."""
        if len(self.stored.prompt.ids) <= MAX_MATCHED_TOKENS:
            return self._find(self.prompt)
        self._n_changes = self._store.n_changes
        return self._to_use(self.stored, self._by_ids(self.stored.packed_ids), None)

    def _by_ids(self, packed: bytes) -> Match:
        source = self._store.ram_first(self.root.key, packed)
        return match_prompt(source, self.root.key, packed)

    def _to_use(self, stored: StoredPrefix, match: Match, text: str | None) -> StoredPrefix:
        """Return the prefix with the number of tokens to restore, and why the number is not larger.

        If `text` is None, the search for this reason leaves out the trees of other roots.
        """
        ids = stored.prompt.ids
        n_most = len(ids) - 1  # the last token must be computed, to get logits
        n_tokens, refusal = min(match.n_tokens, n_most), None
        diverges = match.n_tokens == 0 or (match.n_tokens < n_most and not match.at_end)
        if self._n_worth is not None:
            n_tokens = min(n_tokens, self._n_worth)
        elif diverges:
            n_tokens, refusal = tokens_to_reuse(match, n_tokens, self._store, self.model)
        reason, detail = None, ""
        if diverges:
            reason, detail = why_not_stored(ids, text, match, self.root, self._store)
            if reason is Reason.NOTHING_ALIKE and stored.reason is not None:
                reason, detail = stored.reason, stored.detail
            elif refusal and reason is Reason.DIVERGED:
                reason = refusal
        return replace(stored, match=match, n_tokens=n_tokens, reason=reason, detail=detail)

    def agreed(self) -> tuple[Prompt, int]:
        """Return the prompt that all ranks read, and how many of its tokens to restore at most."""
        if self._store.n_changes != self._n_changes:
            self.stored = self._find_again()
        return replace(self.stored.prompt, messages=()), self.stored.n_tokens

    def _point(self, lost: Collection[bytes] = (), most: int | None = None) -> RestorePoint | None:
        """Return the restore point; it is never inside an image. O(blocks).

        Records with a key in `lost`, and all tokens after the first `most`, are treated as missing.
        """
        stored, n_tokens = self.stored, self.stored.n_tokens if most is None else most
        # Without checkpoints, a change of the store rarely changes the restore point.
        n_changes = 0 if self.model.spec.any_prefix else self._store.n_changes
        asked = stored, n_tokens, frozenset(lost), n_changes
        if self._planned is not None and self._planned[0] == asked:
            return self._planned[1]
        find = partial(self.model.saver.find, stored.match.path, store=self._store, lost=lost)
        point, ids = find(n_tokens), stored.prompt.ids
        while point and (n_before := before_image(ids, point.n_tokens)) < point.n_tokens:
            point = find(n_before)
        if point is not None:
            self._needed.update(need.record.key for need in point.needed)
        self._planned = asked, point
        return point

    def prefetch(self) -> bool:
        """Start to prefetch if many bytes must be read; return whether the restore is slow.

        "Many" means more than `MIN_PREFETCH_BYTES`. The restore is slow if blocks are prefetched,
        or if it joins more than `MIN_STEPWISE_BYTES`. O(blocks).
        """
        point = self._point()
        if point is None:
            return False
        sizes = [(need.record, need.n_bytes) for need in point.needed]
        pool = self._store.pool
        if sum(n for record, n in sizes if record.key not in pool) > MIN_PREFETCH_BYTES:
            self._prefetch = self._store.reader.prefetch(sizes, self.root)
            if self._closed:  # another thread has closed the lookup by now
                self.close()
        is_large = sum(n for _, n in sizes) > MIN_STEPWISE_BYTES
        return self._prefetch is not None or is_large

    def hold(self) -> None:
        """Pin the needed blocks that are in RAM, until `let_go` or `close`."""
        point = None
        with suppress(Exception):  # the restore meets the same error, and reports it
            point = None if self._pinned else self._point()
        if point is not None:
            keys = [need.record.key for need in point.needed]
            self._pinned = self._store.pool.pin(keys, prefetch=True)
            if self._closed:  # another thread has closed the lookup by now
                self.let_go()

    def let_go(self) -> None:
        pinned, self._pinned = self._pinned, []
        self._store.pool.unpin(pinned, prefetch=True)

    @property
    def restored_bytes(self) -> int:
        """The bytes of the caches, once the restore has begun; 0 before."""
        if not self.is_begun:
            return 0
        spec, n_room = self.model.spec, capacity(len(self.stored.prompt.ids))
        return n_room * spec.bytes_per_token + spec.bytes_per_checkpoint

    @property
    def is_begun(self) -> bool:
        return self._steps is not None or self._reuse is not None

    def advance(self, seconds: float) -> bool:
        """After the prefetch, restore for `seconds`; return whether the request may enter."""
        is_read = self._prefetch is None or self._prefetch.finished
        if self.model.ranks.are_several:
            return is_read  # all ranks restore together, when the request enters
        if self._reuse is None and is_read:
            self._run(seconds, in_steps=True)
        return self._reuse is not None

    def close(self) -> None:
        """Release all prefetched blocks and restored caches. Any thread; may be called again."""
        self._closed = True
        self._reuse = None
        self._steps = None  # the generator refers to this lookup and to half-filled caches
        self.let_go()
        if self._prefetch is not None:
            self._prefetch.release()
            self._prefetch = None

    def restore(self, is_gone: Callable[[], bool] = lambda: False) -> Reuse:
        """Load the stored tokens into caches, as far as blocks can be read.

        O(blocks), plus MLX's work on each block. With one rank, raises ClientGone if `is_gone`
        returns True or the lookup was closed; this is checked every 0.1 s. With several ranks, the
        restore always finishes, because no rank may stop alone.
        """
        if self._prefetch is not None:
            self._prefetch.stop()  # this thread reads the remaining blocks faster
        several = self.model.ranks.are_several  # if so, no rank may stop alone
        try:
            while (reuse := self._reuse) is None:
                if not several and (self._closed or is_gone()):
                    raise ClientGone
                self._run(math.inf if several else _LOOK_S, in_steps=False)
        finally:
            self.close()
        reuse.outcome = replace(reuse.outcome, restore_ms=self._spent_s * 1e3)
        return reuse

    def _run(self, seconds: float, *, in_steps: bool) -> None:
        """Continue to restore for about `seconds`, at least one step."""
        started = perf_counter()
        # If a step raises, the restore starts over.
        steps, self._steps = self._steps or self._restoring(in_steps=in_steps), None
        try:
            next(steps)
            while perf_counter() - started < seconds:
                next(steps)
            self._steps = steps
        except StopIteration as end:
            self._reuse = end.value
        if self._closed and not self.model.ranks.are_several:  # closed by another thread
            self._steps = self._reuse = None
        self._spent_s += perf_counter() - started

    def _restoring(self, *, in_steps: bool) -> Generator[None, None, Reuse]:
        """Restore the stored tokens; if a record cannot be used, restart without it."""
        n_wanted = 0
        lost: set[bytes] = set()
        read: list[Record] = []
        most: int | None = None
        together, joined = self.model.ranks, None
        while joined is None:
            if self._store.n_changes != self._n_changes and not together.are_several:
                self.stored = self._find_again()
            n_wanted = max(n_wanted, self.stored.n_tokens)
            point = None
            try:
                point = self._point(lost, most)
                steps = self._joined(point, lost, read, in_steps) if point else ()
                joined = (yield from steps) if point else _Joined()
            except Exception:
                if not together.are_several:
                    raise
                logger.exception("kvpersist: this rank could not restore a prompt")
                joined = _Joined()
            if joined is None:
                read.clear()  # the next attempt fills it again
                continue
            # Each rank reports its number of tokens, and all ranks restore the smallest number. The
            # lowest bit of a report says whether the rank needs the canary.
            is_checked = bool(read) or not self.model.is_known
            reports = together.all_of(2 * joined.n_tokens + is_checked, "how much is restored")
            n_tokens, is_needed = zip(*(divmod(report, 2) for report in reports), strict=True)
            least = min(n_tokens)
            if least < max(n_tokens):
                self._others_have_less |= least < joined.n_tokens
                joined, most = None, least
            elif point is not None:
                is_checked = any(is_needed)
                if not self._is_usable(point, joined, read, lost, is_checked=is_checked):
                    joined = None
        chain = [block for block in self.stored.match.path if block.stop <= joined.n_tokens]
        return Reuse(self.stored.prompt, self._outcome(joined, n_wanted), joined.caches, chain)

    def _is_usable(
        self,
        point: RestorePoint,
        joined: _Joined,
        read: list[Record],
        lost: set[bytes],
        *,
        is_checked: bool,
    ) -> bool:
        """Return whether the canary accepts the restored blocks; if so, record their use.

        If not, quarantine the records in `read`, and add the keys of the point's records to `lost`.
        """
        store, model, caches = self._store, self.model, joined.caches or ()
        if self._canary and is_checked:
            ids = self.stored.prompt.ids[: point.n_tokens]
            difference = canary_difference(model.model, model.spec, caches, ids)
            if not model.ranks.agree(difference <= CANARY_TOLERANCE, "the canary"):
                for record in read:
                    store.lose(record, f"canary: recomputed KV differs by {difference:.0%}")
                read.clear()
                # Blocks that were in RAM stay, but this prompt no longer uses them.
                lost.update(need.record.key for need in point.needed)
                return False
        used = [block.key for block in self.stored.match.path if block.start < point.n_tokens]
        records = (need.record for need in point.needed)
        store.touch(used, [record for record in records if isinstance(record, Checkpoint)])
        return True

    def _joined(
        self, point: RestorePoint, lost: set[bytes], read: list[Record], in_steps: bool
    ) -> Generator[None, None, _Joined | None]:
        """Load the records of a restore point into caches with room for the rest of the prompt.

        Yields before each record, and after some buffers are made. Adds to `read` each record that
        came from a lower tier. If a record is unusable, adds its key to `lost` and returns None.

        in_steps: replies run between the steps, so each step must be short. Otherwise blocks that
        are all in RAM are joined together, which takes less time.
        """
        spec, store, needed = self.model.spec, self._store, point.needed
        n_read: Counter[int | str] = Counter()
        n_bytes: Counter[str] = Counter()
        seconds: defaultdict[str, float] = defaultdict(float)
        n_window: Counter[int] = Counter()
        for need in needed:
            if need.window is not None:
                n_window[need.window] += need.stop - need.start
        coming = store.reader.load_all([need.record for need in needed], self.root)
        whole = not in_steps and all(store.pool.get(need.record.key) for need in needed)
        started = perf_counter()
        n_room = capacity(len(self.stored.prompt.ids))
        joiner = Joiner(spec, point.n_tokens, n_room, n_window, whole=whole)
        for _ in joiner.make_room() if in_steps else ():
            seconds[RAM] += perf_counter() - started
            yield
            started = perf_counter()
        for need in needed:
            seconds[RAM] += perf_counter() - started
            yield
            loaded = next(coming)
            misfit = arrays_fit(need.forms, loaded.arrays) if loaded is not None else None
            if misfit is not None:
                store.lose(need.record, f"does not fit the model: {misfit}")
            if loaded is None or misfit is not None:
                lost.add(need.record.key)
                return None
            n_bytes[RAM] += loaded.n_bytes
            if loaded.tier != RAM:
                seconds[loaded.tier] += loaded.read_s
                n_bytes[loaded.tier] += loaded.n_bytes
                read.append(need.record)
            started = perf_counter()
            n_tokens, kind = need.stop - need.start, need.window or "full"
            if need.window is None and isinstance(need.record, Checkpoint):
                joiner.add_state(loaded.arrays, n_tokens)
                kind = "state"
                if spec.recurrent:
                    n_tokens = point.n_tokens  # the state depends on all tokens
            elif need.window is None and spec.is_unfinished(need.record.n_tokens):
                joiner.add_unfinished(loaded.arrays, n_tokens)
            else:
                joiner.add(Piece(loaded.arrays, need.start, need.stop), need.window)
            n_read[kind] += n_tokens if loaded.tier != RAM else 0
        caches = joiner.finish()
        seconds[RAM] += perf_counter() - started
        yield
        for tier, n in n_bytes.items():
            self.model.speed.learn(tier, n, seconds[tier])
        names = [*(tier.name for tier in store.tiers), SHARED]
        slowest = [name for name in names if name in n_bytes][-1]
        return _Joined(point.n_tokens, caches, max(n_read.values(), default=0), slowest)

    def _outcome(self, joined: _Joined, n_wanted: int) -> Outcome:
        stored, n_reused = self.stored, joined.n_tokens
        ids, granule = stored.prompt.ids, self.model.saver.granule
        is_all_stored = stored.match.n_tokens >= len(ids) - 1
        if n_reused == 0:
            kind = Kind.MISS
        elif n_reused == len(ids) - 1:
            kind = Kind.EXACT
        elif is_all_stored or (stored.match.at_end and n_reused == stored.n_tokens):
            kind = Kind.EXTEND
        else:
            kind = Kind.DIVERGE
        reason, detail = stored.reason, stored.detail
        has_damage = self._store.blocks_quarantined > self._n_quarantined
        gone = self._store.disk.gone
        if has_damage and any(gone.get(key) is Gone.QUARANTINED for key in self._needed):
            reason, detail = Reason.DAMAGED, ""
        elif n_reused // granule < before_image(ids, n_wanted // granule * granule) // granule:
            missing = self.model.saver.missing
            reason, detail = Reason.OTHER_RANK if self._others_have_less else missing, ""
        elif is_all_stored and n_reused < before_image(ids, len(ids) - 1):
            reason = Reason.OTHER_RANK if self._others_have_less else Reason.INSIDE_BLOCK
        divergence = stored.divergence if kind in (Kind.DIVERGE, Kind.MISS) else None
        n_read, tier = joined.n_read, joined.tier
        return Outcome(kind, len(ids), n_reused, n_read, 0.0, reason, detail, divergence, tier)


def tokens_to_reuse(
    match: Match, n_tokens: int, store: BlockStore, model: LoadedModel
) -> tuple[int, Reason | None]:
    """Return `n_tokens`, or 0 and the reason if restoring would be slower than computing.

    `match` diverges after these tokens. Fewer than `MIN_TOKENS` are never restored; then the result
    is 0 without a reason. O(blocks).
    """
    if n_tokens < MIN_TOKENS:
        return 0, None  # so few tokens are a template's first words
    spec, speed = model.spec, model.speed
    blocks = [block for block in match.path if block.start < n_tokens]
    sizes = {n: forms_bytes(spec.block_arrays(n)) for n in {block.n_tokens for block in blocks}}
    n_bytes: Counter[str] = Counter()
    for block in blocks:
        n_bytes[RAM] += sizes[block.n_tokens]  # joining takes time in addition to reading
        if (tier := store.tier_of(block.key)) != RAM:
            n_bytes[tier] += sizes[block.n_tokens]
    for tier in n_bytes:
        n_bytes[tier] += spec.bytes_per_checkpoint
    compute_s = speed.pace.seconds(0, n_tokens)
    restore_s = sum(n / speed.rates[tier] for tier, n in n_bytes.items() if tier in speed.rates)
    if compute_s is None or restore_s <= compute_s:
        return n_tokens, None
    return 0, Reason.NOT_WORTH_IT
