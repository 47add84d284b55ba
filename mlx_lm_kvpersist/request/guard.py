"""The guard judges the loaded model's precision, in steps, and replaces a bad one.

Generation thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace

import mlx.core as mx

from ..cache.geometry.precision import PrecisionChoice, layout_in_words
from ..cache.measuring.guard import (
    Verdict,
    is_guarded,
    judge,
    judging_bytes,
    known_verdict,
    put_verdict,
)
from ..cache.steps import Steps
from ..ranks import end, ranks
from .model import LoadedModel
from .serving import Serving

logger = logging.getLogger(__name__)


class Guard:
    """Judges the default precision of a model that was not judged before.

    A step takes about `step_s`, those of `fit` as long as they do after it was loaded. `fit`
    returns the model in another precision, when no sequence has caches of the one before.
    """

    def __init__(
        self,
        serving: Serving,
        default: PrecisionChoice,
        fit: Callable[[PrecisionChoice, Verdict], Steps[LoadedModel]],
        step_s: float,
    ) -> None:
        self._serving, self._default, self._fit = serving, default, fit
        self._step_s = step_s

    def steps(self) -> Steps[None]:
        """Judge it, and have it served in the precision that it bears."""
        model = self._serving.model
        if self._serving.doing:
            return  # the model was refused
        if not (is_guarded(self._default) and model.verdict is None and model.spec.quantized):
            return
        try:
            yield from self._run()
        except ReferenceError:
            pass  # the server has dropped the model
        except Exception as error:
            # It may lack memory. Nothing is persisted, so the next start tries again.
            what = "kvpersist: the precision of %s could not be checked: %r"
            logger.warning(what, model.name, error)
            if ranks().are_several and not isinstance(error, ValueError):  # which all have
                end("the guard failed on one rank")
        mx.clear_cache()

    def _run(self) -> Steps[None]:
        serving, loaded = self._serving, self._serving.model
        state = serving.store.view.state
        # Another server of this folder may have been quicker.
        verdict = ranks().first(
            lambda: known_verdict(state, loaded.fingerprint, self._default), "what the guard found"
        )
        if verdict is None:
            verdict = yield from self._judged(loaded)
        model = replace(loaded, verdict=verdict)
        if verdict.n_refused:
            yield
            model = yield from self._fit(verdict.choice(self._default), verdict)
        # Last: a model that cannot be served in other bits is not refused at the next start.
        kept = loaded.fingerprint, self._default, verdict
        serving.store.change_index(
            "keep what the guard found", lambda index: put_verdict(index.state, *kept)
        )
        serving.serve(model)
        if verdict.n_refused:
            words = layout_in_words(model.spec.layout)
            logger.warning("kvpersist: %s gets %s from now on: %s", loaded.name, words, verdict)
        else:
            logger.info("kvpersist: %s: %s", loaded.name, verdict)

    def _judged(self, loaded: LoadedModel) -> Steps[Verdict]:
        """Judge it while there is memory for the text in two caches.

        A request that lacks their memory gets it, and the judging begins anew.
        """
        memory, n_bytes = self._serving.memory, judging_bytes(loaded.tokenizer, loaded.spec)
        its = loaded.model, loaded.tokenizer, loaded.spec, self._default, self._step_s
        while True:
            while ranks().first(lambda: memory.lacks(n_bytes), "whether the guard has memory"):
                yield
            with memory.holding(n_bytes), closing(judge(*its)) as steps:
                while not ranks().first(memory.lacks, "whether the guard goes on"):
                    try:
                        next(steps)
                    except StopIteration as end:
                        verdict: Verdict = end.value
                        return ranks().told(verdict, "the guard's verdict")
                    yield
