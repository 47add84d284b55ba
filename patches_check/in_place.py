"""A pytest plugin for mlx-lm's own tests: what this package changes is in place before they import.

The tests bring model providers of their own, which say nothing of what ours adds, and models that
no plugin was told of. Both are made up for here; our batch generator is that of `mlx_lm.generate`,
too, and computes prompts its own way, on stock's caches.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import mlx_lm.generate as generate
import mlx_lm.server as server
import mlx_lm.utils as utils

from mlx_lm_kvpersist import host
from mlx_lm_kvpersist.host import manager
from mlx_lm_kvpersist.host.answers import ModelSupport, PrefillLimits
from mlx_lm_kvpersist.host.scheduling.model_provider import PluginCaches, PluginModelProvider

MOST_TOKENS = 2048
_SAYS = {"is_ready": True, "is_loading": False, "reads_images": False, "max_context": None}

_stock_load = utils.load


def load(*args: Any, **kwargs: Any) -> Any:
    """Load as stock does; prompts of a model that makes no caches itself are computed in chunks."""
    model, *rest = _stock_load(*args, **kwargs)
    if not hasattr(type(model), "make_cache"):
        limits = PrefillLimits(0.5, lambda position: MOST_TOKENS)
        model.make_cache = PluginCaches(model, "tests", ModelSupport(lambda: None, limits=limits))
    return (model, *rest)


def put_in_place() -> None:
    host.install(["kvpersist"])
    folder = tempfile.mkdtemp(prefix="own-tests-store-")
    parser = argparse.ArgumentParser()
    for stock in ("--model", "--draft-model", "--kv-bits", "--prompt-cache-bytes"):
        parser.add_argument(stock)
    manager.ask("add_options", parser=parser)
    manager.ask("configure", args=parser.parse_args(["--kvpersist-dir", folder]))
    utils.load, generate.BatchGenerator = load, server.BatchGenerator
    init = server.ResponseGenerator.__init__

    def with_provider(self: Any, provider: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(provider, PluginModelProvider):
            vars(provider).update({**_SAYS, **vars(provider)})
            provider.n_logits = 1 << 30
        init(self, provider, *args, **kwargs)

    server.ResponseGenerator.__init__ = with_provider


put_in_place()
