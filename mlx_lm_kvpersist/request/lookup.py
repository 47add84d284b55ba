"""A prompt's way to restored caches: find what is stored of it, plan, prefetch, restore, prove.

Generation thread. Whatever the store raises costs a restore, never a reply: the caller catches it.
Arrays from RAM are as they were computed here. What comes from a tier below has its checksum
verified by the store; that it fits this model is checked by its shapes, and by a canary where the
caches allow it: their last tokens are run again on top of the restored prefix.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

from ..block import Block, Checkpoint, Record, Root, pack_ids
from ..cache.blocks.canary import CANARY_TOLERANCE, canary_difference
from ..cache.blocks.cut_join import Joiner, Piece
from ..cache.geometry.spec import arrays_fit, forms_bytes
from ..cache.live.packed import headroom
from ..errors import ClientGone
from ..host.answers import Prompt
from ..match.tree import NO_MATCH, Match, before_image, match_prompt, splice
from ..ranks import ranks
from ..store.block_store import BlockStore, KVBlock, Prefetch
from ..store.records import Gone
from ..store.tier import RAM, SHARED
from .model import LoadedModel
from .outcome import COLD, Kind, Outcome, Reason, divergence_at, why_not_stored
from .saver import RestorePoint

logger = logging.getLogger(__name__)

MIN_TOKENS = 16
"""Fewer are computed in less time than it takes to make caches of them, on any device."""

MIN_PREFETCH_BYTES = 8 << 20
"""Less than this is read from disk in the time of one or two steps: no request waits for it."""

MIN_STEPWISE_BYTES = 64 << 20
"""Less than this is joined in the time of one or two steps of the replies."""

_LOOK_S = 0.1
"""How often a restore looks whether its client is still there."""

_NOT_READ, _FROM_RAM, _FROM_BELOW = range(3)
"""What a rank says of the blocks of a restore."""

_MAX_MATCHED = 3
"""Blocks can disappear between find and restore: a turn that is being saved replaces the end of the
turn before it, another server evicts, a check fails. Then the prompt is matched again, so often."""


@dataclass
class Reuse:
    """The result of a lookup: the prompt to feed, and caches that hold its first tokens.

    `caches` is None when nothing is reused. `chain` are the stored blocks that the caches hold
    as a whole. `outcome` counts the tokens and says why not more were reused.
    """

    prompt: Prompt
    outcome: Outcome
    caches: list[Any] | None = None
    chain: list[Block] = field(default_factory=list)


@dataclass(frozen=True)
class Found:
    """A prompt that begins with stored ids, of which the first `n_tokens` are worth restoring.

    `diverges`: the prompt goes on differently from what is stored, or nothing of it is. `refusal`
    then says why not all matching tokens are worth it.
    """

    prompt: Prompt
    match: Match
    diverges: bool = True
    n_tokens: int = 0
    refusal: Reason | None = None


@dataclass(frozen=True)
class _Restored:
    """Caches that hold the first `n_tokens` of a prompt.

    `n_read` of them came from tiers below RAM. `tier` is the slowest that something came from.
    """

    n_tokens: int = 0
    caches: list[Any] | None = None
    n_read: int = 0
    tier: str = COLD


class Lookup:
    """One prompt, from what is stored of it to the caches that hold its beginning.

    The prompt is matched when the lookup is made, and again only if blocks came or went since.
    `prompt` has replies as the ids that the model produced.

    Several ranks restore together: rank 0 matches the prompt, and says how many tokens are worth
    it. The others look for that prompt's ids and for at most so many tokens, `n_worth`. What all of
    them have is restored.
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
        # Without the text of every id the prompt is matched by ids.
        tokens = model.text if n_worth is None else None
        self._text = tokens.known_text(prompt.ids) if tokens else None
        self._prefetch: Prefetch | None = None
        self._held: list[KVBlock] = []
        self._steps: Generator[None, None, Reuse] | None = None
        self._reuse: Reuse | None = None
        self._closed = False
        self._spent_s = 0.0
        self._n_quarantined = store.blocks_quarantined  # a prefetch finds damage, too
        self._needed: set[bytes] = set()
        """Keys of blocks and checkpoints that were to be restored."""
        self.found = Found(prompt, NO_MATCH)
        """What `restore` will use, as far as nothing is stored or lost meanwhile."""
        try:
            self.found = self._find()
        except Exception:
            if n_worth is None:
                raise
            logger.exception("kvpersist: what is stored could not be looked up")

    def _find(self) -> Found:
        """Match the prompt with what is stored, and put the stored ids in front of it."""
        self._n_changes = self._store.n_changes
        self._nearest = NO_MATCH
        store, prompt, tokens = self._store, self.prompt, self.model.text
        packed = pack_ids(prompt.ids)
        match: Match | None = None
        if tokens is not None and self._text is not None:
            source = store.ram_first(self.root.key, self._text)
            match = match_prompt(source, self.root.key, self._text, tokens, packed)
            self._nearest = match
            if match.n_tokens == 0:
                return Found(prompt, match)
            if not packed.startswith(match.packed_ids):
                spliced = splice(prompt.ids, self._text, match, tokens, self.model.encode)
                if spliced is not None:
                    prompt = with_ids(prompt, spliced.ids, spliced.boundaries)
                match = replace(match, n_tokens=spliced.n_stored) if spliced is not None else None
        if match is None:
            source = store.ram_first(self.root.key, packed)
            match = match_prompt(source, self.root.key, packed)
        if match.n_tokens == 0:
            return Found(prompt, self._nearest)
        n_most = len(prompt.ids) - 1  # the last token must run, to give logits
        n_tokens, refusal = min(match.n_tokens, n_most), None
        diverges = match.n_tokens < n_most and not match.at_end
        if self._n_worth is not None:
            n_tokens = min(n_tokens, self._n_worth)
        elif diverges:
            n_tokens, refusal = tokens_to_reuse(match, n_tokens, store, self.model)
        return Found(prompt, match, diverges, n_tokens, refusal)

    def agreed(self) -> tuple[Prompt, int]:
        """Return the prompt that is fed, and how many of its tokens are worth restoring."""
        if self._store.n_changes != self._n_changes:
            self.found = self._find()
        return replace(self.found.prompt, messages=()), self.found.n_tokens

    def _point(self, lost: Collection[bytes] = (), most: int | None = None) -> RestorePoint | None:
        """Return what to restore; a model cannot go on from inside an image.

        Whatever has its key in `lost` counts as missing, and all after the first `most` tokens.
        """
        found, n_tokens = self.found, self.found.n_tokens if most is None else most
        while True:
            point = self.model.saver.find(found.match.path, n_tokens, self._store, lost)
            if point is None:
                return None
            n_tokens = before_image(found.prompt.ids, point.n_tokens)
            if n_tokens == point.n_tokens:
                self._needed.update(one.record.key for one in point.needed)
                return point

    def _common_point(self, lost: Collection[bytes]) -> RestorePoint | None:
        """Return what to restore of what all ranks have."""
        most = None
        while True:
            try:
                point = self._point(lost, most)
            except Exception:
                if not ranks().are_several:
                    raise
                logger.exception("kvpersist: what is stored could not be looked up")
                point = None
            n_tokens = ranks().all_of(point.n_tokens if point else 0, "how much is stored")
            most = min(n_tokens)
            if most == max(n_tokens):
                return point
            self._others_have_less |= point is not None and most < point.n_tokens

    def prefetch(self) -> bool:
        """Start to read from disk what `restore` will need; False if that would not take long.

        `restore` does not depend on it: by then these blocks may be gone, or others stored.
        """
        point = self._point()
        if point is None:
            return False
        needed = point.needed
        n_bytes = sum(one.n_bytes for one in needed if one.record.key not in self._store.pool)
        if n_bytes > MIN_PREFETCH_BYTES:
            wanted = [(one.record, one.n_bytes) for one in needed]
            self._prefetch = self._store.reader.prefetch(wanted, self.root)
        is_large = sum(one.n_bytes for one in needed) > MIN_STEPWISE_BYTES
        return self._prefetch is not None or is_large

    def hold(self) -> int:
        """Keep what of it is in RAM there, until `let_go` or `close`; return the bytes of that."""
        try:
            point = self._point()
        except Exception:
            if not ranks().are_several:
                raise
            point = None  # which is told when all restore
        if point is not None and not self._held:
            keys = [one.record.key for one in point.needed]
            self._held = self._store.pool.pin(keys, prefetch=True)
            if self._closed:  # by another thread meanwhile
                self.let_go()
        return sum(entry.n_bytes for entry in self._held)

    def let_go(self) -> None:
        """Let what `hold` kept be evicted."""
        held, self._held = self._held, []
        self._store.pool.unpin(held, prefetch=True)

    @property
    def restored_bytes(self) -> int:
        """Bytes of the caches that are being filled, and of those that are full."""
        if self._steps is None and self._reuse is None:
            return 0
        spec, n_tokens = self.model.spec, self.found.n_tokens
        room = headroom(len(self.found.prompt.ids) - n_tokens)
        return (n_tokens + room) * spec.bytes_per_token + spec.bytes_per_checkpoint

    @property
    def is_begun(self) -> bool:
        """Whether `advance` has begun to restore."""
        return self._steps is not None or self._reuse is not None

    def advance(self, seconds: float) -> bool:
        """Restore for about so long, if all is prefetched; tell whether nothing is left to do."""
        is_there = self._prefetch is None or self._prefetch.finished
        if ranks().are_several:
            return is_there  # all of them restore it together, when it enters
        if self._reuse is None and is_there:
            self._run(seconds, in_steps=True)
        return self._reuse is not None

    def close(self) -> None:
        """Let go of what was prefetched and restored. Any thread, any number of times."""
        self._closed = True
        self._reuse = None
        self._steps = None  # its frame holds this and half-filled caches
        self.let_go()
        if self._prefetch is not None:
            self._prefetch.release()
            self._prefetch = None

    def restore(self, is_gone: Callable[[], bool] = lambda: False) -> Reuse:
        """Load the stored tokens into caches, as many as can be read and are worth it.

        Raises ClientGone where `is_gone` said so meanwhile, or this was closed.
        """
        if self._prefetch is not None:
            self._prefetch.stop()  # blocks that it has not read yet are read faster from here
        try:
            if ranks().are_several:  # none of them stops by itself
                started = perf_counter()
                reuse = _completed(self._restoring(in_steps=False))
                self._spent_s = perf_counter() - started
            else:
                while (found := self._reuse) is None:
                    if self._closed or is_gone():
                        raise ClientGone
                    self._run(_LOOK_S, in_steps=False)
                reuse = found
        finally:
            self.close()
        reuse.outcome = replace(reuse.outcome, restore_ms=self._spent_s * 1e3)
        return reuse

    def _run(self, seconds: float, *, in_steps: bool) -> None:
        """Restore for about so long, at least one step, from where it stopped."""
        started = perf_counter()
        # What raises in a step is begun anew.
        steps, self._steps = self._steps or self._restoring(in_steps=in_steps), None
        try:
            next(steps)
            while perf_counter() - started < seconds:
                next(steps)
            self._steps = steps
        except StopIteration as end:
            self._reuse = end.value
        if self._closed:  # by another thread meanwhile
            self._steps = self._reuse = None
        self._spent_s += perf_counter() - started

    def _restoring(self, *, in_steps: bool) -> Generator[None, None, Reuse]:
        """Restore what is stored; what is lost meanwhile costs its tokens only."""
        n_wanted = n_matched = 0
        lost: set[bytes] = set()
        restored: _Restored | None = None
        while restored is None:
            is_changed = self._store.n_changes != self._n_changes
            if is_changed and n_matched < _MAX_MATCHED and not ranks().are_several:
                n_matched += 1
                self.found = self._find()
            found = self.found
            n_wanted = max(n_wanted, found.n_tokens)
            point = self._common_point(lost)
            if point is None:
                restored = _Restored()
            else:
                restored = yield from self._load(point, lost, in_steps=in_steps)
        outcome = self._outcome(found, restored, n_wanted)
        chain = [block for block in found.match.path if block.stop <= restored.n_tokens]
        return Reuse(found.prompt, outcome, restored.caches, chain)

    def _load(
        self, point: RestorePoint, lost: set[bytes], *, in_steps: bool
    ) -> Generator[None, None, _Restored | None]:
        """Load what a restore point needs into caches with room for the rest of the prompt.

        Returns None when a block cannot be read by one of the ranks, or the canary found that what
        was read is not this model's, which then goes to quarantine. `lost` gets the keys of these
        blocks.

        Yields after each block, and after some buffers that are made. in_steps: whether replies go
        on between, so that no step may be long; otherwise what is in RAM anyway is joined at once,
        which takes less time in all.
        """
        ids, store, together = self.found.prompt.ids, self._store, ranks()
        read: list[Record] = []
        try:
            restored = yield from self._joined(point, lost, read, in_steps=in_steps)
        except Exception:
            if not together.are_several:
                raise
            logger.exception("kvpersist: a rank could not restore")
            lost.update(one.record.key for one in point.needed)
            restored = None
        found = _NOT_READ if restored is None else _FROM_BELOW if read else _FROM_RAM
        of_all = together.all_of(found, "what is read")
        if restored is None or _NOT_READ in of_all:
            return None
        is_checked = _FROM_BELOW in of_all or not self.model.is_known
        if self._canary and is_checked:
            restored_ids, caches = ids[: point.n_tokens], restored.caches or ()
            model = self.model
            difference = canary_difference(model.model, model.spec, caches, restored_ids)
            if not together.agree(difference <= CANARY_TOLERANCE, "the canary"):
                for record in read:
                    store.lose(record, f"canary: recomputed KV differs by {difference:.0%}")
                # Blocks in RAM are not damaged, but the model does not continue from them.
                lost.update(one.record.key for one in point.needed)
                return None
        used = [block.key for block in self.found.match.path if block.start < point.n_tokens]
        records = [one.record for one in point.needed if isinstance(one.record, Checkpoint)]
        store.touch(used, records)
        return restored

    def _joined(
        self, point: RestorePoint, lost: set[bytes], read: list[Record], *, in_steps: bool
    ) -> Generator[None, None, _Restored | None]:
        """Do `_load` without a check of what it gives; `read` gets what came from below RAM."""
        spec, store, needed = self.model.spec, self._store, point.needed
        n_read: Counter[int | str] = Counter()
        n_bytes: Counter[str] = Counter()
        seconds: defaultdict[str, float] = defaultdict(float)
        n_held: Counter[int] = Counter()
        for one in needed:
            if one.window is not None:
                n_held[one.window] += one.stop - one.start
        coming = store.reader.load_all([one.record for one in needed], self.root)
        whole = not in_steps and all(store.pool.get(one.record.key) for one in needed)
        started = perf_counter()
        room = headroom(len(self.found.prompt.ids) - point.n_tokens)
        joiner = Joiner(spec, point.n_tokens, room, n_held, whole=whole)
        for _ in joiner.make_room() if in_steps else ():
            seconds[RAM] += perf_counter() - started
            yield
            started = perf_counter()
        for one in needed:
            seconds[RAM] += perf_counter() - started
            yield
            started = perf_counter()
            loaded = next(coming)
            if loaded is None:
                lost.add(one.record.key)
                return None
            if (misfit := arrays_fit(one.forms, loaded.arrays)) is not None:
                store.lose(one.record, f"does not fit the model: {misfit}")
                lost.add(one.record.key)
                return None
            n_bytes[RAM] += loaded.n_bytes
            if loaded.tier != RAM:
                seconds[loaded.tier] += loaded.read_s
                n_bytes[loaded.tier] += loaded.n_bytes
                read.append(one.record)
            started = perf_counter()
            n_tokens, kind = one.stop - one.start, one.window or "full"
            if one.window is None and isinstance(one.record, Checkpoint):
                joiner.add_state(loaded.arrays, n_tokens)
                kind = "state"
                if spec.recurrent:
                    n_tokens = point.n_tokens  # it stands for all of them
            elif one.window is None and spec.is_unfinished(one.record.n_tokens):
                joiner.add_unfinished(loaded.arrays, n_tokens)
            else:
                joiner.add(Piece(loaded.arrays, one.start, one.stop), one.window)
            n_read[kind] += n_tokens if loaded.tier != RAM else 0
        caches = joiner.finish()
        seconds[RAM] += perf_counter() - started
        yield
        for tier, n in n_bytes.items():
            self.model.speed.learn(tier, n, seconds[tier])
        names = [*(tier.name for tier in store.tiers), SHARED]
        slowest = [name for name in names if name in n_bytes][-1]
        return _Restored(point.n_tokens, caches, max(n_read.values(), default=0), slowest)

    def _outcome(self, found: Found, restored: _Restored, n_wanted: int) -> Outcome:
        """Return what was reused, and why not more."""
        ids, n_reused = found.prompt.ids, restored.n_tokens
        granule = self.model.saver.granule
        if n_reused == 0:
            kind = Kind.MISS
        elif n_reused == len(ids) - 1:
            kind = Kind.EXACT
        elif found.match.at_end and n_reused == found.n_tokens:
            kind = Kind.EXTEND
        else:
            kind = Kind.DIVERGE
        reason: Reason | None = None
        detail = ""
        has_damage = self._store.blocks_quarantined > self._n_quarantined
        gone = self._store.disk.gone
        if has_damage and any(gone.get(key) is Gone.QUARANTINED for key in self._needed):
            reason = Reason.DAMAGED
        elif n_reused // granule < before_image(ids, n_wanted // granule * granule) // granule:
            missing = self.model.saver.missing
            reason = Reason.OTHER_RANK if self._others_have_less else missing
        elif found.diverges:
            reason, detail = why_not_stored(ids, self._text, found.match, self.root, self._store)
            if found.refusal and reason is Reason.DIVERGED:
                reason = found.refusal
        divergence = None
        if kind in (Kind.DIVERGE, Kind.MISS):
            divergence = divergence_at(self._text or "", self._nearest, self.prompt.messages)
        why = reason, detail, divergence, restored.tier
        return Outcome(kind, len(ids), n_reused, restored.n_read, 0.0, *why)


def tokens_to_reuse(
    match: Match, n_tokens: int, store: BlockStore, model: LoadedModel
) -> tuple[int, Reason | None]:
    """Return how many of the first `n_tokens` of a diverging match to use, and why not all.

    The time to restore them is compared with the time to compute them again.
    """
    if n_tokens < MIN_TOKENS:
        return 0, None  # a template's first words; nothing of the conversation is stored
    blocks = [block for block in match.path if block.start < n_tokens]
    reason = None
    if model.spec.any_prefix and not _is_restored(blocks[-1:], n_tokens, store, model):
        # A whole block must be read for the few of its tokens that are of use.
        n_tokens, reason = blocks.pop().start, Reason.NOT_WORTH_IT
    if blocks and not _is_restored(blocks, n_tokens, store, model):
        return 0, Reason.NOT_WORTH_IT
    return n_tokens, reason


def _is_restored(
    blocks: Sequence[Block], n_tokens: int, store: BlockStore, model: LoadedModel
) -> bool:
    """Say whether restoring blocks takes no longer than computing their tokens up to `n_tokens`."""
    spec, speed, start = model.spec, model.speed, blocks[0].start
    n_bytes: Counter[str] = Counter()
    for block in blocks:
        size = forms_bytes(spec.block_arrays(block.n_tokens))
        n_bytes[RAM] += size  # what is read is joined there, too
        if (tier := store.tier_of(block.key)) != RAM:
            n_bytes[tier] += size
    for tier in n_bytes:
        n_bytes[tier] += spec.bytes_per_checkpoint
    compute_s = speed.pace.seconds(start, n_tokens - start)
    restore_s = sum(n / speed.rates[tier] for tier, n in n_bytes.items() if tier in speed.rates)
    return compute_s is None or restore_s <= compute_s


def with_ids(prompt: Prompt, ids: list[int], boundaries: Mapping[int, int]) -> Prompt:
    """Return the prompt with other ids, cut where it was cut, as far as a token ends there.

    boundaries: number of tokens before a place in the old ids -> in the new ids.
    """
    segments, types = [], []
    start = end = 0
    for segment, segment_type in zip(prompt.segments, prompt.segment_types, strict=True):
        end += len(segment)
        stop = len(ids) if end == len(prompt.ids) else boundaries.get(end)
        if stop is not None and stop > start:
            segments.append(ids[start:stop])
            types.append(segment_type)
            start = stop
    return replace(prompt, ids=ids, segments=segments, segment_types=types)


def _completed(steps: Generator[None, None, Reuse]) -> Reuse:
    """Do all steps at once; return the result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Reuse = end.value
            return result
