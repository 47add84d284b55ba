"""The guard: while nobody asks, it judges the loaded model's precision, and replaces a bad one.

Generation thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace

import mlx.core as mx

from ..cache.geometry.precision import PrecisionChoice, layout_in_words
from ..cache.measuring.guard import Loss, Verdict, is_guarded, judge, known_verdict, put_verdict
from ..cache.steps import Steps
from .model import LoadedModel
from .serving import Serving

_QUIET_S = 2.0
"""How long nothing was served before the guard works: a client that goes on does not meet it."""

logger = logging.getLogger(__name__)


class Guard:
    """Judges the default precision of a model that was not judged before, one step at a time.

    A step takes about `step_s`, those of `fit`, which returns the model in another precision, as
    long as they do after it was loaded. No request runs during a step, so the next one has the new
    caches and the new root. Between steps the guard holds the text in two caches.
    """

    def __init__(
        self,
        serving: Serving,
        default: PrecisionChoice,
        fit: Callable[[PrecisionChoice, Verdict], Steps[LoadedModel]],
        step_s: float,
    ) -> None:
        self._serving, self._default, self._fit = serving, default, fit
        self._step_s, self._quiet_s = step_s, _QUIET_S
        model = serving.model
        self._is_needed = is_guarded(default) and model.verdict is None and model.spec.quantized
        self._steps: Iterator[None] | None = None
        self._losses: list[Loss] = []

    def pause(self) -> None:
        """Free the caches, because requests need the memory: a precision is judged in one go.

        So that little is done in vain, the guard waits twice as long from then on.
        """
        if self._steps is not None:
            self._steps, self._quiet_s = None, 2 * self._quiet_s

    def step(self, idle_s: float) -> None:
        """Do the next step, if there is one. Nothing was served for `idle_s`."""
        if not self._is_needed or idle_s < self._quiet_s:
            return
        self._steps = self._steps or self._run()
        try:
            next(self._steps)
            return
        except (StopIteration, ReferenceError):
            pass  # it is done, or the server has dropped the model
        except Exception as error:
            # It may lack memory. Nothing is persisted, so the next start tries again.
            name = self._serving.model.name
            logger.warning("kvpersist: the precision of %s could not be checked: %r", name, error)
        self._is_needed, self._steps = False, None
        mx.clear_cache()

    def _run(self) -> Iterator[None]:
        serving, loaded = self._serving, self._serving.model
        state = serving.store.view.state
        # Another server of this folder may have been quicker.
        verdict = known_verdict(state, loaded.fingerprint, self._default)
        if verdict is None:
            its = loaded.tokenizer, loaded.spec, self._default, self._step_s, self._losses
            verdict = yield from judge(loaded.model, *its)
        model = replace(loaded, verdict=verdict)
        if verdict.n_refused:
            yield
            model = yield from self._fit(verdict.choice(self._default), verdict)
        # Last: a model that cannot be served in other bits is not refused at the next start.
        kept = loaded.fingerprint, self._default, verdict
        serving.store.change_index(
            "keep what the guard found", lambda index: put_verdict(index.state, *kept)
        )
        serving.model = model
        if verdict.n_refused:
            words = layout_in_words(model.spec.layout)
            logger.warning("kvpersist: %s gets %s from now on: %s", loaded.name, words, verdict)
        else:
            logger.info("kvpersist: %s: %s", loaded.name, verdict)
