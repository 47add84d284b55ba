"""Everything that this package changes in mlx-lm: one table. docs/plugins.md shows it, too.

All targets but one are globals of `mlx_lm.server`. The stock objects behind them stay as they are,
so other users of mlx_lm in the process are not affected. The exception is attention over packed
keys, a global of the module that all models call it through. It behaves differently only for keys
that bring an attention of their own. Beside several CUDA GPUs one function of MLX is replaced, too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import mlx.core as mx

from ..hookspecs import hookimpl
from ..http.server import plugin_run_http_server
from ..run import plugin_argparse, plugin_run
from ..scheduling.batch_generator import PluginBatchGenerator
from ..scheduling.caches import PluginPromptCache, plugin_quantized_attention
from ..scheduling.model_provider import PluginModelProvider
from ..scheduling.response_generator import PluginResponseGenerator
from . import probes
from .patch import Patch, Signature, Uses


def subclass(plugin: type[Any]) -> Callable[[type[Any]], type[Any]]:
    """Return a function that puts the methods of `plugin` before those of a stock class."""
    return lambda stock: type(plugin.__name__, (plugin, stock), {"__doc__": plugin.__doc__})


def back_on_its_device(stock: Callable[[], None]) -> Callable[[], None]:
    """Return `clear_cache` whose thread ends on the GPU that it computes on."""

    @wraps(stock)
    def clear_cache() -> None:
        stock()
        mx.eval(mx.ones(1) + 1)  # MLX makes the GPU of an operation the thread's current one

    return clear_cache


_SERVER_ARGUMENTS = "server_class=..., handler_class=..."

PATCHES: tuple[Patch, ...] = (
    Patch(
        name="options",
        target="mlx_lm.server:argparse",
        why="The stock server has no --plugin, and plugins have options.",
        expect=(Signature("main", "()"), Uses("main", "argparse")),
        replace=plugin_argparse,
        verify=probes.options_reach_plugins,
    ),
    Patch(
        name="model_provider",
        target="mlx_lm.server:ModelProvider",
        why="Plugins prepare for a model when it is loaded, and make the caches of this model.",
        expect=(
            Signature(
                "ModelProvider._load",
                "(self, model_path, adapter_path=None, draft_model_path=None)",
            ),
            Signature("ModelProvider.load_default", "(self)"),
            Signature("make_prompt_cache", "(model, max_kv_size=None)"),
            Uses("main", "ModelProvider"),
        ),
        replace=subclass(PluginModelProvider),
        verify=probes.loaded_models_make_plugin_caches,
    ),
    Patch(
        name="batch_generator",
        target="mlx_lm.server:BatchGenerator",
        why="Plugins merge caches, where stock asks the first only; prompts are computed in turns.",
        expect=(
            Signature("BatchGenerator._make_batch", "(self, n)"),
            Signature("BatchGenerator._next", "(self)"),
            Signature("BatchGenerator.extract_cache", "(self, uids)"),
            Signature("BatchGenerator.remove", "(self, uids, return_prompt_caches=False)"),
            Uses("BatchGenerator._make_batch", "_unprocessed_sequences"),
            Uses("BatchGenerator._make_batch", "_currently_processing"),
            Uses("BatchGenerator.next", "_next"),
            Uses("BatchGenerator._next", "_generation_batch"),
            Uses("ResponseGenerator._generate", "BatchGenerator"),  # which the next patch wraps
        ),
        replace=subclass(PluginBatchGenerator),
        verify=probes.batches_merge_through_plugins,
    ),
    Patch(
        name="response_generator",
        target="mlx_lm.server:ResponseGenerator",
        why="Plugins see messages before and ids after tokenizing, and take requests.",
        expect=(
            Signature("ResponseGenerator._tokenize", "(self, tokenizer, request, args)"),
            Signature("ResponseGenerator._next_request", "(self, timeout=None)"),
            Signature("ResponseGenerator._is_batchable", "(self, args)"),
            Signature(
                "ResponseGenerator.generate",
                "(self, request, generation_args, progress_callback=None)",
                may_grow=True,
            ),
            Uses("ResponseGenerator.__init__", "requests"),
            Uses("ResponseGenerator._generate", "_next_request"),
            Uses("ResponseGenerator.generate", "requests"),
            Uses("ResponseGenerator._generate", "_time_budget"),
            Uses("run", "ResponseGenerator"),
        ),
        replace=subclass(PluginResponseGenerator),
        verify=probes.requests_pass_plugins,
    ),
    Patch(
        name="prompt_cache",
        target="mlx_lm.server:LRUPromptCache",
        why="Plugins give and save prompt caches; a fetch that leaves no token kills the server.",
        expect=(
            Signature("LRUPromptCache.fetch_nearest_cache", "(self, model, tokens)", may_grow=True),
            Signature(
                "LRUPromptCache.insert_cache",
                "(self, model, tokens, prompt_cache, *, cache_type='assistant')",
                may_grow=True,
            ),
            Signature("run", f"(host, port, model_provider, {_SERVER_ARGUMENTS})", may_grow=True),
        ),
        replace=subclass(PluginPromptCache),
        verify=probes.prompt_cache_asks_plugins,
    ),
    Patch(
        name="attention",
        target="mlx_lm.models.base:quantized_scaled_dot_product_attention",
        why="Caches bring an attention of their own for packed keys; stock's is wrong for some.",
        expect=(
            Signature(
                "quantized_scaled_dot_product_attention",
                "(queries, q_keys, q_values, scale, mask, group_size=64, bits=8)",
            ),
            Signature(
                "scaled_dot_product_attention",
                "(queries, keys, values, cache, scale, mask, sinks=None)",
            ),
            Uses("scaled_dot_product_attention", "quantized_scaled_dot_product_attention"),
            Uses("scaled_dot_product_attention", "hasattr"),
        ),
        replace=plugin_quantized_attention,
        verify=probes.packed_keys_attend_themselves,
    ),
    Patch(
        name="http_server",
        target="mlx_lm.server:_run_http_server",
        why="Plugins see requests and replies, add headers and answer paths of their own.",
        expect=(
            Signature(
                "_run_http_server",
                f"(host, port, response_generator, {_SERVER_ARGUMENTS})",
                may_grow=True,
            ),
            Signature("APIHandler.handle_chat_completions", "(self)"),
            Signature("APIHandler.handle_text_completions", "(self)"),
            Signature("APIHandler.handle_completion", "(self, request, stop_words)", may_grow=True),
            Signature("APIHandler._set_completion_headers", "(self, status_code=200)"),
            Signature("APIHandler._set_stream_headers", "(self, status_code=200)"),
            Signature(
                "APIHandler.generate_response",
                "(self, text, finish_reason, prompt_token_count=None, "
                "completion_token_count=None, prompt_cache_count=None, token_logprobs=None, "
                "top_tokens=None, tokens=None, tool_calls=None, reasoning_text=None)",
                may_grow=True,
            ),
            Uses("run", "_run_http_server"),
        ),
        replace=plugin_run_http_server,
        verify=probes.http_reaches_plugins,
    ),
    Patch(
        name="run",
        target="mlx_lm.server:run",
        why="Plugins are configured and tested before the server listens, and end with it.",
        expect=(
            Signature("run", f"(host, port, model_provider, {_SERVER_ARGUMENTS})", may_grow=True),
            Uses("main", "run"),
        ),
        replace=plugin_run,
        verify=probes.run_starts_and_stops_plugins,
    ),
)

SEVERAL_GPUS = Patch(
    name="several_gpus",
    target="mlx.core:clear_cache",
    why="It leaves its thread on the last CUDA GPU; from there MLX cannot read the first one's.",
    expect=(),
    replace=back_on_its_device,
    verify=probes.buffers_are_read_after_clearing,
)


def needed() -> tuple[Patch, ...]:
    """Return the patches that this machine needs."""
    return (*PATCHES, SEVERAL_GPUS) if mx.device_count(mx.gpu) > 1 else PATCHES


class PatchChecks:
    """A plugin of our own: proves every patch before the other plugins test themselves."""

    @hookimpl(tryfirst=True)
    def self_test(self) -> None:
        for patch in needed():
            patch.check()
