"""The server's generation thread: what a request must not end, and what happens if it ends."""

from __future__ import annotations

import _thread
import logging
import signal
import threading
from queue import Queue
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from ..errors import GenerationStopped, RequestRefused
from .request_checks import check_ids, check_prompt_ids

if TYPE_CHECKING:
    from mlx_lm.server import ResponseGenerator as Stock
else:
    Stock = object

LAST_ANSWERS_S = 1.0
"""How long clients are still told that the server ends."""

logger = logging.getLogger(__name__)


class RequestQueue(Queue[Any]):
    """The queue of requests. Once closed, it refuses new ones and answers those that wait."""

    def __init__(self) -> None:
        super().__init__()
        self._reply_queues: WeakSet[Queue[Any]] = WeakSet()
        self._closing = threading.Lock()
        self._error: Exception | None = None

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        with self._closing:
            if self._error is not None:
                raise self._error
            if item[0] is not None:
                self._reply_queues.add(item[0])
            super().put(item, block, timeout)

    def close(self, error: Exception) -> None:
        """Answer every request that is queued or being served with `error`, and refuse others."""
        with self._closing:
            self._error = error
            for reply_queue in self._reply_queues:
                reply_queue.put(error)


class GuardedResponseGenerator(Stock):  # type: ignore[misc]
    """Ends the server when its generation thread ends; stock would go on without generating.

    Up to 0.31.3 stock lets every request wait for ever then; later it answers 404 for ever.
    """

    @property
    def requests(self) -> RequestQueue:
        return self._requests

    @requests.setter
    def requests(self, stock: Queue[Any]) -> None:
        # Stock sets its own queue before it starts the thread.
        self._requests = RequestQueue()

    @property
    def is_healthy(self) -> bool:
        """Whether requests are served now: the default model is loaded and the thread runs."""
        return bool(self.model_provider.is_ready and self._generation_thread.is_alive())

    def generation_available(self) -> bool:
        """Return True: stock asks before it queues a request, and the queue knows more."""
        return True

    def _generate(self) -> None:
        try:
            super()._generate()
        except BaseException as error:
            self._end_server(error)
        else:
            self.requests.close(GenerationStopped("the server ends"))

    def _end_server(self, error: BaseException) -> None:
        """Answer all clients, and interrupt the main thread: `run` reports `fatal_error`."""
        delay_s = 0.0
        stopped = GenerationStopped("the server ends: its model could not be loaded")
        if self.model_provider.is_ready:
            self.model_provider.is_ready = False
            logger.error("the generation thread ended", exc_info=error)
            delay_s = LAST_ANSWERS_S
            what = f"its generation thread was stopped by {type(error).__name__}: {error}"
            error = stopped = GenerationStopped(f"the server ends: {what}")
        self.model_provider.fatal_error = error
        self.requests.close(stopped)
        clock = threading.Timer(delay_s, _thread.interrupt_main, (signal.SIGTERM,))
        clock.daemon = True
        clock.start()

    def _tokenize(self, tokenizer: Any, request: Any, args: Any) -> tuple[Any, ...]:
        # Here the model is loaded, and stock reports to the client what is raised.
        if args.logits.logit_bias or args.sampling.top_k > 0 or args.top_logprobs > 0:
            check_ids(args, self.model_provider.n_logits)
        try:
            stock: tuple[Any, ...] = super()._tokenize(tokenizer, request, args)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise RequestRefused(f"no prompt can be made of this request ({reason})") from error
        check_prompt_ids(stock[0])
        return stock
