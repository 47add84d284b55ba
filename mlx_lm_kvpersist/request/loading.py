"""A model that the server has loaded is made ready; what takes time, while nobody asks.

What was found out of it before is read from the store's index, and it is ready at once. Else it is
served in caches that its shapes allow, and nothing is stored or restored until the steps of its
`Preparation` are done. Generation thread.
"""

from __future__ import annotations

import json
import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import mlx.core as mx

from .. import __version__
from ..cache.geometry.architectures import architecture_of
from ..cache.geometry.fingerprint import local_path, model_fingerprint
from ..cache.geometry.kinds import GroupKind
from ..cache.geometry.on_grid import end_on_grid
from ..cache.geometry.precision import PrecisionChoice, layout_in_words
from ..cache.geometry.spec import ModelCacheSpec
from ..cache.live.attention import Strategy
from ..cache.live.policy import AttentionPlan
from ..cache.measuring.attention_check import device_key, planned, planning
from ..cache.measuring.guard import Verdict, is_guarded, known_verdict, own_caches
from ..cache.measuring.prefill_memory import PrefillMemory, measuring_prefill
from ..cache.steps import Steps, completed
from ..errors import ModelNotSupported
from ..match.text import TokenText
from ..ranks import Ranks, alone, ranks
from ..store.block_store import BlockStore
from ..units import show_bytes
from .model import LoadedModel, Speed

logger = logging.getLogger(__name__)

_MODEL_KEY = "model/3/"
_ROUND_TRIP_KEY = "round-trip/1/"
"""The numbers grow when what is found out changes: then it is found out anew."""

_STAGES = (
    "the round trip of a tiny model is checked",
    "its caches are tried, alone and in a batch",
    "its attention is checked",
    "the memory of its prompts is measured",
)

_Measured = tuple[float, float, float]
"""What `measuring_prefill` finds."""


@dataclass(frozen=True)
class Asked:
    """The options that decide how a model's prompts are computed and kept.

    `with_text`: whether its prompts may be stored as text. `max_prefill_bytes`: what a chunk of a
    prompt may take beside model and caches.
    """

    choice: PrecisionChoice
    attention: Strategy | Literal["auto"]
    max_prefill_bytes: int
    with_text: bool


class Preparation:
    """A model that the provider has loaded: what is known of it, and the steps to all of it.

    `doing` says what is being found out; it is "" once `model` is ready, so that conversations may
    be stored and restored. A draft model is prepared as the model is, after it. `prove` returns
    steps that check, for a precision, that what is stored and restored gives the logits that it
    should, and whether prompts may be computed together. They are done once for a combination of
    versions, device and options.

    Raises:
        ModelNotSupported: the model's conversations cannot be kept. The steps may raise it, too,
            and whatever `prove` raises.
        OSError: a file of the model cannot be read.
    """

    def __init__(
        self,
        provider: Any,
        store: BlockStore,
        asked: Asked,
        prove: Callable[[PrecisionChoice], Steps[bool]],
    ) -> None:
        model_path, adapter_path, draft_path = provider.model_key
        self._store, self._asked, self._prove = store, asked, prove
        self._state = _State(store)
        adapter = Path(adapter_path) if adapter_path else None
        self._fingerprint = model_fingerprint(local_path(model_path), adapter)
        text = TokenText.of(provider.tokenizer) if asked.with_text else None
        if text is None and asked.with_text:
            logger.warning("kvpersist: this tokenizer's prompts are matched by ids, not by text")
        self.doing = ""
        self._model = weakref.proxy(provider.model)
        together = ranks()
        self._computed: Any = self._model
        """The model where something is computed, not only its shapes."""
        if together.are_several:
            self._computed = _OneCallAtATime(self._model)
            if not together.same(self._fingerprint, "the model's files"):
                raise ModelNotSupported("the ranks have different files of the model")
            self._fingerprint += f" {part_of_model(provider, together)}"
        choice, verdict = self._choice()
        spec, known = self._known(choice)
        end_on_grid(self._model)
        _check_equal_layers(spec, together)
        speed = Speed(PrefillMemory.of(spec, asked.max_prefill_bytes))
        about = provider.tokenizer, spec, self._fingerprint, text, str(model_path)
        self.model = LoadedModel(self._computed, *about, speed, verdict)
        self._is_known = together.agree(known is not None, "whether the model is known")
        if known is not None and self._is_known:
            self.model = self._fitted(spec, known, verdict)
        else:
            self._say(int(self._is_proven(choice)))
        self._draft = self._of_draft(provider, draft_path) if draft_path else None
        if self._draft is not None:
            self.model = replace(self.model, draft=self._draft.model)
            self.doing = self.doing or self._draft.doing

    def _of_draft(self, provider: Any, path: str) -> Preparation:
        """Return what is known of the draft model. It reads the ids of the other's tokenizer.

        Raises ModelNotSupported where tokens cannot be taken back from the caches of one of them,
        as mlx-lm does with those of a draft.
        """
        about = {"model": provider.draft_model, "tokenizer": provider.tokenizer}
        loaded = SimpleNamespace(**about, model_key=(path, None, None))
        draft = Preparation(loaded, self._store, replace(self._asked, with_text=False), self._prove)
        for name, spec in (("model", self.model.spec), ("draft model", draft.model.spec)):
            for group in spec.groups:
                if group.kind is not GroupKind.FULL:
                    raise ModelNotSupported(
                        f"a draft model is in use, and layer {group.slots[0]} of the {name} has a "
                        f"{group.cache}, from which tokens cannot be taken back"
                    )
        n_caches, n_layers = len(self.model.spec.template), len(provider.model.layers)
        if n_caches != n_layers:
            raise ModelNotSupported(
                f"a draft model is in use, and the model has {n_caches} caches for its {n_layers} "
                "layers: mlx-lm takes those of the draft model for its own"
            )
        return draft

    def _choice(self) -> tuple[PrecisionChoice, Verdict | None]:
        """Return the model's precision, by what the guard found if it judged the model before."""
        choice = self._asked.choice
        if not is_guarded(choice):
            return choice, None
        verdict = ranks().first(
            lambda: known_verdict(self._state, self._fingerprint, choice), "what the guard found"
        )
        return verdict.choice(choice) if verdict else choice, verdict

    def steps(self) -> Steps[None]:
        """Find out what is not known; the log says which stage begins."""
        if not self._is_known:
            self.model = yield from self.fit(*self._choice(), self._say)
        if self._draft is not None:
            for _ in self._draft.steps():
                self.doing = self._draft.doing and f"the draft model: {self._draft.doing}"
                yield
            self.model = replace(self.model, draft=self._draft.model)
        self.doing = ""

    def fit(
        self,
        choice: PrecisionChoice,
        verdict: Verdict | None,
        say: Callable[[int], None] = lambda stage: None,
    ) -> Steps[LoadedModel]:
        """Return the model in a precision; what is not known of it so is found out and kept.

        `say` is called with the stage that begins.
        """
        if not ranks().agree(self._is_proven(choice), "whether the round trip was checked"):
            say(0)
            yield
            if ranks().are_several:
                joins = self._proven_together(choice)
            else:
                joins = yield from self._prove(choice)
            self._state.put(self._key(_ROUND_TRIP_KEY, choice), joins)
        yield
        with own_caches(self._model):
            spec, measured = self._known(choice)  # another server of this store may be quicker
        if not ranks().agree(measured is not None, "whether the model was measured"):
            measured = None
        if measured is None:
            joins = self._state.get(self._key(_ROUND_TRIP_KEY, choice))
            spec = yield from self._tried(choice, say, joins=joins)
            say(3)
            yield
            measured = yield from measuring_prefill(self._computed, spec)
            found = {
                "spec": spec.describe(),
                "plans": {name: plan.describe() for name, plan in spec.plans.items()},
                "prefill": measured,
            }
            self._state.put(self._key(_MODEL_KEY, choice, self._fingerprint), found)
        return self._fitted(spec, measured, verdict)

    def _proven_together(self, choice: PrecisionChoice) -> bool:
        """Do the round trip on every rank. Raises ModelNotSupported where it fails on any."""
        joins, why = False, ""
        try:
            with alone():
                joins = completed(self._prove(choice))
        except Exception as error:
            why = str(error)
        if not ranks().agree(not why, "the round trip"):
            raise ModelNotSupported(f"the round trip of a tiny model fails on a rank: {why}")
        return joins

    def _tried(
        self, choice: PrecisionChoice, say: Callable[[int], None], *, joins: bool
    ) -> Steps[ModelCacheSpec]:
        """Find how the model's caches are made, batched and read, and that they can be restored.

        Without `joins` its prompts are computed one by one.
        """
        model = self._computed
        say(1)
        with own_caches(model):
            spec = ModelCacheSpec.probe(model, choice)
        facts = architecture_of(self._model)
        if facts is not None:
            spec = facts.applied_to(spec)
        spec = replace(spec, joins=spec.joins and joins)
        _check_equal_layers(spec, ranks())
        say(2)
        yield
        attention = self._asked.attention if facts and facts.packed else "dequantize"
        return (yield from planning(model, spec, attention))

    def _key(self, kind: str, choice: PrecisionChoice, fingerprint: str = "") -> str:
        versions = f"{device_key()} mlx-lm {version('mlx-lm')} kvpersist {__version__}"
        return f"{kind}{fingerprint} {choice!r} {self._asked.attention} {versions}"

    def _is_proven(self, choice: PrecisionChoice) -> bool:
        return self._state.get(self._key(_ROUND_TRIP_KEY, choice)) is not None

    def _known(self, choice: PrecisionChoice) -> tuple[ModelCacheSpec, _Measured | None]:
        """Return a model's spec, and what its chunks take if all of it was found out before.

        Else the spec is what its shapes tell.
        """
        found: Any = None
        if self._is_proven(choice):
            found = self._state.get(self._key(_MODEL_KEY, choice, self._fingerprint))
        shaped = ModelCacheSpec.probe(self._model, choice)
        try:
            its = found["spec"]
            joins = its["batching"] == "prompts and replies"
            batches = joins or its["batching"] == "replies"
            spec = replace(shaped, batches=batches, joins=joins)
            if its == json.loads(json.dumps(spec.describe())):
                token_bytes, score_bytes, token_s = map(float, found["prefill"])
                measured = token_bytes, score_bytes, token_s
                plans = found["plans"].items()
                return planned(spec, {n: AttentionPlan.read(plan) for n, plan in plans}), measured
        except (KeyError, TypeError, ValueError):
            pass  # nothing was found, or what was is damaged
        return shaped, None

    def _say(self, stage: int) -> None:
        doing = f"{_STAGES[stage]} ({stage + 1} of {len(_STAGES)})"
        if doing != self.doing:
            self.doing = doing
            logger.info("kvpersist: %s: nothing is kept yet: %s", self.model.name, doing)

    def _fitted(
        self, spec: ModelCacheSpec, measured: _Measured, verdict: Verdict | None
    ) -> LoadedModel:
        """Return the model as it is computed, stored and restored from now on."""
        model, asked = self.model, self._asked
        model.speed.memory = PrefillMemory.of(spec, asked.max_prefill_bytes, measured)
        model.speed.supposed_token_s = measured[-1]
        about = described(spec, verdict), places(self._store)
        logger.info("kvpersist: %s: %s; %s", model.name, *about)
        for group in spec.full:
            if group.precision is None and not asked.choice.is_full_precision:
                logger.warning(
                    "kvpersist: %d of its layers stay in full precision: %s",
                    len(group.slots),
                    group.why,
                )
        return replace(model, spec=spec, verdict=verdict)


class _OneCallAtATime:
    """A model that several ranks compute; its calls are evaluated one by one.

    Where two are evaluated together, ranks may compute parts of them in another order.
    """

    __slots__ = ("_model",)

    def __init__(self, model: Any) -> None:
        object.__setattr__(self, "_model", model)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        logits = self._model(*args, **kwargs)
        mx.eval(logits)
        return logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._model, name, value)

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        return vars(self._model)


def _check_equal_layers(spec: ModelCacheSpec, together: Ranks) -> None:
    """Raise ModelNotSupported if ranks have caches of other kinds.

    They could go on from other places, and would be tried in other ways.
    """
    kinds = [(group.kind.name, group.precision is not None) for group in spec.groups]
    if not together.same(kinds, "the kinds of layers"):
        raise ModelNotSupported(
            "the ranks have layers of different kinds; divide the model evenly, or by tensors"
        )


def part_of_model(provider: Any, together: Ranks) -> str:
    """Return which part of a model a rank computes, in words that no other part has."""
    kind = "pipeline" if provider.cli_args.pipeline else "tensor"
    inner = getattr(provider.model, "model", provider.model)
    layers = getattr(inner, "start_idx", None), getattr(inner, "end_idx", None)
    return f"{kind} {together.rank} of {together.size}, layers {layers[0]}-{layers[1]}"


class _State:
    """Values that are persisted in a store's index. The writer thread writes them: it may wait."""

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self._put: dict[str, Any] = {}

    def get(self, key: str) -> Any:
        return self._put[key] if key in self._put else self._store.view.state.get(key)

    def put(self, key: str, value: Any) -> None:
        self._put[key] = json.loads(json.dumps(value))
        what = "keep what was found out of a model"
        self._store.change_index(what, lambda index: index.state.put(key, value))


def places(store: BlockStore) -> str:
    """Return where conversations are kept and how much space they take, for the log."""
    ram = show_bytes(store.limits.max_ram_bytes)
    return f"conversations in {store.disk.files}, and up to {ram} of RAM"


def described(spec: ModelCacheSpec, verdict: Verdict | None = None) -> str:
    """Return how full layers are stored, batched and attended, for the log."""
    plans = {str(plan) for plan in spec.plans.values()}
    attention = f"attention: {' or '.join(sorted(plans))}" if plans else "attention as in mlx-lm"
    found = f"{show_bytes(spec.bytes_per_token)} a token, {layout_in_words(spec.layout)}"
    if any(group.precision for group in spec.full):
        own_bytes = sum(group.full_precision_bytes for group in spec.full)
        found += (
            f" ({spec.bits_per_number:.1f} on average with scales), "
            f"{spec.bytes_per_token / own_bytes:.2f} of full memory"
        )
    judged = f"; {verdict}" if verdict else ""
    served = "replies in batches" if spec.batches else "one request at a time"
    return f"{found}{judged}; {served}, {attention}"
