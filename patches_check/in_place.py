"""A pytest plugin for mlx-lm's own tests: it applies this package's patches first.

The tests' model providers get the attributes of the plugin's provider. A model without `make_cache`
gets stock's caches if `KVPERSIST_CACHES` is "stock". Otherwise it gets the plugin's quantized
caches in the default precision. The plugin's batch generator also replaces the class in
`mlx_lm.generate`.
"""

from __future__ import annotations

import argparse
import atexit
import importlib
import os
import shutil
import tempfile
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import mlx_lm.server as server
import mlx_lm.utils as utils

from mlx_lm_kvpersist import host
from mlx_lm_kvpersist.host import manager
from mlx_lm_kvpersist.host.hooks import ModelSupport, PrefillLimits
from mlx_lm_kvpersist.host.scheduling.model_provider import PluginCaches, PluginModelProvider

MOST_TOKENS = 2048
_SAYS = {"is_ready": True, "is_loading": False, "reads_images": False, "max_context": None}

# `import mlx_lm.generate as generate` gives the function of that name, not the module.
generate = importlib.import_module("mlx_lm.generate")
_stock_load = utils.load


def load(*args: Any, **kwargs: Any) -> Any:
    model, tokenizer, *rest = _stock_load(*args, **kwargs)
    if not hasattr(type(model), "make_cache"):
        support = ModelSupport(lambda: None)
        if os.environ["KVPERSIST_CACHES"] != "stock":
            key, cli_args = (str(args[0]), None, None), argparse.Namespace(kv_bits=None)
            provider = SimpleNamespace(
                model=model, tokenizer=tokenizer, model_key=key, cli_args=cli_args
            )
            ((_, support),) = manager.ask("model_loaded", provider=provider)
        limits = PrefillLimits(0.5, lambda position: MOST_TOKENS)
        model.make_cache = PluginCaches(model, "tests", replace(support, limits=limits))
    return (model, tokenizer, *rest)


def put_in_place() -> None:
    host.install(["kvpersist"])
    folder = tempfile.mkdtemp(prefix="own-tests-store-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    parser = argparse.ArgumentParser()
    for stock in ("--model", "--draft-model", "--kv-bits", "--prompt-cache-bytes"):
        parser.add_argument(stock)
    manager.ask("add_options", parser=parser)
    manager.ask("configure", args=parser.parse_args(["--kvpersist-dir", folder]))
    utils.load = load
    setattr(generate, "BatchGenerator", server.BatchGenerator)  # noqa: B010
    init = server.ResponseGenerator.__init__

    def with_provider(self: Any, provider: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(provider, PluginModelProvider):
            vars(provider).update({**_SAYS, **vars(provider)})
            provider.n_logits = 1 << 30
        init(self, provider, *args, **kwargs)

    server.ResponseGenerator.__init__ = with_provider


put_in_place()
