"""Have one conversation with one model in all ways that must give equal results, and compare.

The reference is one set of our caches that lives as long as the conversation. It is compared with:

- the same conversation over a store that is closed and reopened;
- another last turn;
- prompts that diverge within the stored conversation;
- a batch that has an unrelated prompt.
"""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from mlx_lm_kvpersist.cache.geometry.kinds import end_on_grid
from mlx_lm_kvpersist.cache.geometry.spec import ModelCacheSpec, architecture_of, spec_of
from mlx_lm_kvpersist.cli.quality_checks import server_attention
from mlx_lm_kvpersist.errors import ModelNotSupported

from .build import build
from .compare import TOLERANCE, Comparison, compare, worst
from .conversation import N_REPLY, N_STRANGER, N_TURNS, Conversation, random_ids
from .drive import Reply, Row, alone, can_batch, generate, plainly
from .facts import QUANTIZED, packed
from .geometry import describe_caches, describe_precisions, describe_reuse
from .rounded import rounded
from .stock import StockFails, batches_right, difference_of_pieces
from .stored import StoredModel

_RESTARTS = (2, 4)
"""The store is reopened before these turns."""

_N_MORE = 6

FINE = ("equal", "refused", "stock fails")
"""Results that are not the plugin's fault."""


@dataclass
class Finding:
    """The result for one model of the zoo; all fields can be written as JSON."""

    name: str
    result: str = ""
    """equal, refused, stock fails, WRONG, failed, crashed or hung."""
    reason: str = ""
    caches: str = ""
    precisions: str = ""
    reusable: str = ""
    batching: str = ""
    """The work that is done in one batch: "prompts and replies", "replies" or "nothing"."""
    reused: list[int] = field(default_factory=list)
    """Tokens reused in each turn of the conversation with a store."""
    possible: list[int] = field(default_factory=list)
    """Tokens of each turn's prompt that an earlier turn computed."""
    differences: dict[str, float] = field(default_factory=dict)
    excused: dict[str, float] = field(default_factory=dict)
    """Differences that stock's own caches show as well."""
    n_near_ties: int = 0
    stock_batches_right: str = ""
    pieces: float | None = None
    """The difference of stock's own logits between a prompt computed in pieces and at once."""
    seconds: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def sweep(name: str, seed: int = 0, *, unknown: bool = False) -> Finding:
    """Test one model of the zoo. An error is a finding, too.

    `unknown`: ignore the facts that ship with the package.
    """
    finding = Finding(name)
    started = time.perf_counter()
    try:
        model = build(name, seed)
        finding.caches = describe_caches(make_prompt_cache(model))
        finding.stock_batches_right = batches_right(model)
        try:
            spec = served(model, unknown=unknown)
            end_on_grid(model)
        except ModelNotSupported as error:
            finding.result, finding.reason = "refused", str(error)
            return finding
        with tempfile.TemporaryDirectory() as folder, server_attention():
            _Sweep(model, spec, Path(folder), finding).run()
    except StockFails as error:
        finding.result, finding.reason = "stock fails", str(error)
    except Exception as error:
        finding.result, finding.reason = "failed", f"{type(error).__name__}: {error}"
    finally:
        finding.seconds = time.perf_counter() - started
    return finding


def served(model: Any, *, unknown: bool = False) -> ModelCacheSpec:
    """Return how the server stores a model; with `unknown`, without the shipped facts.

    Attention reads packed keys if the facts allow it, not only if that is faster. Raises
    ModelNotSupported if the plugin refuses a cache class, or the facts refuse the model.
    """
    facts = None if unknown else architecture_of(model)
    spec = spec_of(model, QUANTIZED, facts)
    if facts is None:
        return replace(spec, batches=can_batch(make_prompt_cache(model)))
    return packed(model, spec) if facts.packed else spec


class _Sweep:
    def __init__(self, model: Any, spec: ModelCacheSpec, folder: Path, finding: Finding) -> None:
        self.model, self.spec, self.folder, self.finding = model, spec, folder, finding
        self.talk = Conversation.make()
        self.wrong: list[str] = []

    def run(self) -> None:
        finding = self.finding
        finding.batching = self.spec.batching
        carried = self._carried(self.talk, N_TURNS)
        finding.precisions = describe_precisions(self.spec)
        self.replies = [reply.ids for reply in carried]
        last = self.talk.segments(N_TURNS - 1, self.replies)
        finding.pieces = difference_of_pieces(self.model, last, self.replies[-1])
        self._live(carried)
        stored = StoredModel(self.model, self.spec, self.folder)
        try:
            self._with_a_store(stored, carried)
            self._rewound(stored)
            self._cut_anywhere(stored)
            self._in_batches(stored)
            self._short(stored)
        finally:
            stored.close()
        finding.result = "WRONG" if self.wrong else "equal"
        finding.reason = "; ".join(self.wrong)

    def _carried(
        self,
        talk: Conversation,
        n_turns: int,
        replies: list[list[int]] | None = None,
    ) -> list[Reply]:
        """Carry one set of our caches from turn to turn."""
        answer = partial(alone, batches=self.spec.batches)
        return _hold(self.model, talk, n_turns, answer, self.spec.make_cache(), replies)

    def _live(self, carried: list[Reply]) -> None:
        """Compare our caches with the model's own caches, which round as ours do.

        Other checks compare our caches with each other. They would miss a fault that all share.
        """
        own = rounded(make_prompt_cache(self.model), self.spec.make_cache())
        answer = partial(plainly, at_once=not self.spec.batches)
        plain = _hold(self.model, self.talk, N_TURNS, answer, own, self.replies)
        pairs = zip(plain, carried, strict=True)
        comparison = worst([compare(a.logprobs, b.logprobs) for a, b in pairs])
        # Over packed keys a chunk may cross the end of a block; `plainly` cuts there.
        stock_is_wrong = bool(self.spec.plans) and self._pieces_matter()
        self._check("live", comparison, stock_is_wrong=stock_is_wrong)

    def _check(self, what: str, comparison: Comparison, *, stock_is_wrong: bool = False) -> None:
        """A failure that stock's own caches show, too, is not a fault."""
        self.finding.n_near_ties += comparison.n_near_ties
        if comparison.is_equal or not stock_is_wrong:
            self.finding.differences[what] = comparison.difference
        else:
            self.finding.excused[what] = comparison.difference
        if not comparison.is_equal and not stock_is_wrong:
            self.wrong.append(f"{what}: {comparison}")

    def _with_a_store(self, stored: StoredModel, carried: list[Reply]) -> None:
        comparisons = []
        for turn, reference in enumerate(carried):
            if turn in _RESTARTS:
                stored.restart()
            segments = self.talk.segments(turn, self.replies)
            reply = stored.answer(segments, N_REPLY, reference.ids)
            comparisons.append(compare(reference.logprobs, reply.logprobs))
            outcome = stored.outcomes[-1]
            self.finding.reused.append(outcome.n_reused)
            self.finding.possible.append(len(carried[turn - 1].tokens) if turn else 0)
            if turn and outcome.n_reused == 0:
                self.wrong.append(f"turn {turn + 1} reused nothing")
            if turn in _RESTARTS and outcome.n_restored != outcome.n_reused:
                self.wrong.append(f"turn {turn + 1} did not come from disk")
        self._check("restored", worst(comparisons))

    def _ending(self, seed: int) -> _Ending:
        """Return another last turn, and its reply without a store."""
        segments = self.talk.ending_differently(seed).segments(N_TURNS - 1, self.replies)
        before = self._before_last
        row = Row(segments, copy.deepcopy(before.caches), len(before.tokens), N_REPLY)
        return _Ending(segments, alone(self.model, row, self.spec.batches))

    @cached_property
    def _before_last(self) -> Reply:
        """The second-last turn."""
        return self._carried(self.talk, N_TURNS - 1, self.replies[:-1])[-1]

    def _rewound(self, stored: StoredModel) -> None:
        ending = self._ending(77)
        stored.restart()
        reply = stored.answer(ending.segments, N_REPLY, ending.reply.ids)
        self._check("rewound", compare(ending.reply.logprobs, reply.logprobs))

    def _short(self, stored: StoredModel) -> None:
        """Have a conversation that begins shorter than any window."""
        talk = Conversation(random_ids(21, 3), [random_ids(22, 4), random_ids(23, 7)])
        first, second = self._carried(talk, 2)
        comparisons = []
        for turn, reference in enumerate((first, second)):
            stored.restart()
            segments = talk.segments(turn, [first.ids])
            reply = stored.answer(segments, N_REPLY, reference.ids)
            comparisons.append(compare(reference.logprobs, reply.logprobs))
        # If cutting a prompt changes stock's logits, the canary rightly finds a difference.
        if stored.outcomes[-1].n_reused == 0 and not self._pieces_matter():
            self.wrong.append("a short conversation reused nothing")
        self._check("short", worst(comparisons), stock_is_wrong=self._pieces_matter())

    def _pieces_matter(self) -> bool:
        return (self.finding.pieces or 0.0) > TOLERANCE

    def _cut_anywhere(self, stored: StoredModel) -> None:
        prompt = self.talk.prompt(N_TURNS - 1, self.replies)
        more = random_ids(9, _N_MORE)
        comparisons, places = [], _places(self.talk, prompt)
        reused = {}
        for place in places:
            ids = [*prompt[:place], *[(token + 101) % 250 for token in more]]
            row = stored.row([ids], N_REPLY, None, session="elsewhere")
            reused[place] = row.n_cached
            logits = self._last_logits(ids[row.n_cached :], row.caches)
            expected = self._last_logits(ids, self.spec.make_cache())
            comparisons.append(compare(expected, logits))
        self.finding.reusable = describe_reuse(reused)
        self._check("cut anywhere", worst(comparisons), stock_is_wrong=self._pieces_matter())

    def _last_logits(self, ids: list[int], caches: list[Any]) -> np.ndarray[Any, Any]:
        """Feed ids and return the last token's logits, [1, vocab]."""
        logits = self.model(mx.array([ids]), cache=caches)[:, -1].astype(mx.float32)
        return np.array(logits)

    def _in_batches(self, stored: StoredModel) -> None:
        """The new prompt's reply ends first."""
        batches = self.spec.batches
        ids = random_ids(8, N_STRANGER)
        new = Row([ids], self.spec.make_cache(), n_new=N_REPLY // 2)
        stranger = _Ending([ids], alone(self.model, new, batches))
        for what, joint, seeds in (
            ("in a batch", True, (78, 83)),
            ("joining a batch", False, (79, 84)),
        ):
            endings = [*map(self._ending, seeds), stranger]
            stored.restart()
            rows = [
                stored.row(ending.segments, len(ending.reply.ids), ending.reply.ids, session=what)
                for ending in endings
            ]
            stock_is_wrong = self.finding.stock_batches_right.startswith("no")
            try:
                replies = generate(self.model, rows, batches, joint=joint)
            except Exception:
                if not stock_is_wrong:
                    raise
                comparisons = [Comparison(float("inf"))]
            else:
                pairs = zip(endings, replies, strict=True)
                comparisons = [
                    compare(ending.reply.logprobs, reply.logprobs) for ending, reply in pairs
                ]
            self._check(what, worst(comparisons), stock_is_wrong=stock_is_wrong)


@dataclass(frozen=True)
class _Ending:
    segments: list[list[int]]
    reply: Reply


def _hold(
    model: Any,
    talk: Conversation,
    n_turns: int,
    answer: Callable[[Any, Row], Reply],
    caches: list[Any],
    replies: list[list[int]] | None,
) -> list[Reply]:
    """A turn without one of `replies` generates its reply."""
    reply_ids: list[list[int]] = []
    answers: list[Reply] = []
    n_cached = 0
    for turn in range(n_turns):
        ids = replies[turn] if replies and turn < len(replies) else None
        row = Row(talk.segments(turn, reply_ids), caches, n_cached, N_REPLY, ids)
        reply = answer(model, row)
        caches, n_cached = reply.caches, len(reply.tokens)
        reply_ids.append(reply.ids)
        answers.append(reply)
    return answers


def _places(talk: Conversation, prompt: list[int]) -> list[int]:
    """Return positions at which prompts diverge: in turns, between turns, at a block's end."""
    first = len(talk.system) + len(talk.users[0])
    return [
        len(talk.system),
        first - 20,
        first + N_REPLY,
        first + N_REPLY + len(talk.users[1]) // 2,
        256,
        len(prompt) - len(talk.users[-1]),
    ]
