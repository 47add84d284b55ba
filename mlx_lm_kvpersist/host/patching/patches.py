"""Everything that this package changes in mlx-lm: one table, applied completely or not at all.

Most targets are globals of `mlx_lm.server`, so other users of mlx_lm notice nothing. The exceptions
are attention over packed keys that have a method `attend`, MLX's wired limit and, with several
GPUs, MLX's `clear_cache`.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from types import ModuleType
from typing import Any

import mlx.core as mx

from ...errors import PatchNotEffective, SignatureChanged, TargetMissing
from ..http.server import PluginAPIHandler, plugin_run_http_server
from ..run import plugin_argparse, plugin_run
from ..scheduling.batch_generator import PluginBatchGenerator, plugin_batch_generator
from ..scheduling.model_provider import (
    PluginModelProvider,
    PluginPromptCache,
    WiredLimit,
    plugin_quantized_attention,
)
from ..scheduling.prefill import plugin_stream_generate
from ..scheduling.response_generator import PluginResponseGenerator
from . import probes

_ADVICE = (
    "update mlx-lm-kvpersist, or install a version of mlx-lm that it knows "
    "(mlx-lm-kvpersist doctor lists them)"
)

_REST = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Overrides:
    """Expects that a class of the host has the methods that `by` overrides, with equal parameters.

    Parameters that our method names have mlx-lm's order and defaults. Our method may take other
    parameters with `*args` and `**kwargs` if these have defaults.
    """

    name: str
    by: type[Any]
    methods: tuple[str, ...]

    def check(self, module: ModuleType) -> None:
        for method in self.methods:
            stock = look_up(module, name := f"{self.name}.{method}")
            theirs = inspect.signature(stock).parameters
            own = inspect.signature(getattr(self.by, method))
            named = {key: p.default for key, p in own.parameters.items() if p.kind not in _REST}
            kept = {key: p.default for key, p in theirs.items() if key in named}
            added = [p for key, p in theirs.items() if key not in named and p.kind not in _REST]
            takes_rest = len(named) < len(own.parameters)
            if list(kept.items()) != list(named.items()) or not all(
                takes_rest and p.default is not p.empty for p in added
            ):
                raise SignatureChanged(
                    f"{module.__name__}:{name} is {inspect.signature(stock)} in this mlx-lm, "
                    f"expected {own}; {_ADVICE}"
                )


@dataclass(frozen=True)
class Uses:
    """Expects that the host's function `name` looks up the module global `uses` when it runs.

    Without this, replacing the global has no effect. If `name` is a class, one method suffices.
    """

    name: str
    uses: str

    def check(self, module: ModuleType) -> None:
        target = look_up(module, self.name)
        functions = vars(target).values() if isinstance(target, type) else [inspect.unwrap(target)]
        codes = [function.__code__ for function in functions if hasattr(function, "__code__")]
        if not any(self.uses in names_in(code) for code in codes):
            place = f"{module.__name__}:{self.name}"
            raise SignatureChanged(f"{place} no longer uses {self.uses}; {_ADVICE}")


@dataclass(frozen=True)
class Patch:
    """One replacement of a global of the host.

    target: "module:name". why: the purpose, in a sentence for users. expect: what must be true of
    the unpatched host. replace: takes the original and returns the replacement. verify: takes the
    host's module and raises PatchNotEffective unless the server behaves as patched.
    """

    name: str
    target: str
    why: str
    expect: tuple[Overrides | Uses, ...]
    replace: Callable[[Any], Any]
    verify: Callable[[ModuleType], None]

    @property
    def module(self) -> ModuleType:
        return importlib.import_module(self.target.partition(":")[0])

    @property
    def attribute(self) -> str:
        return self.target.partition(":")[2]

    def check_host(self) -> None:
        """Raise TargetMissing or SignatureChanged unless the host looks as expected."""
        look_up(self.module, self.attribute)
        for expectation in self.expect:
            expectation.check(self.module)

    def check(self) -> None:
        """Raise PatchNotEffective unless the server behaves as patched."""
        try:
            self.verify(self.module)
        except Exception as error:
            what = f"could not be verified: {type(error).__name__}: {error}"
            if isinstance(error, PatchNotEffective):
                what = f"has no effect: {error}"
            raise PatchNotEffective(
                f"patch {self.name} of {self.target} {what}; "
                "report it with the output of mlx-lm-kvpersist selftest"
            ) from error


class PatchSet:
    """The patches that are applied in this process, each with the original object."""

    def __init__(self) -> None:
        self._applied: list[tuple[Patch, Any]] = []

    @property
    def is_applied(self) -> bool:
        return bool(self._applied)

    def apply(self, patches: Sequence[Patch]) -> None:
        """Apply all patches, or none: a failing patch undoes the earlier patches."""
        try:
            # The whole host is checked before the first patch changes it.
            for patch in patches:
                patch.check_host()
            for patch in patches:
                original = getattr(patch.module, patch.attribute)
                setattr(patch.module, patch.attribute, patch.replace(original))
                self._applied.append((patch, original))
                logger.debug("kvpersist: patched %s: %s", patch.target, patch.why)
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        while self._applied:
            patch, original = self._applied.pop()
            setattr(patch.module, patch.attribute, original)


PATCH_SET = PatchSet()


def look_up(module: ModuleType, name: str) -> Any:
    """Return `module.name` for a dotted name; raises TargetMissing if a part is missing."""
    value: Any = module
    for step in name.split("."):
        try:
            value = getattr(value, step)
        except AttributeError:
            raise TargetMissing(
                f"{module.__name__}:{name} is missing in this mlx-lm; {_ADVICE}"
            ) from None
    return value


def names_in(code: Any) -> set[str]:
    """Return the names that a function and the functions inside it look up."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if hasattr(constant, "co_names"):
            names |= names_in(constant)
    return names


def subclass(plugin: type[Any]) -> Callable[[type[Any]], type[Any]]:
    """Return a function that makes a subclass of a stock class; `plugin`'s methods come first."""
    return lambda stock: type(plugin.__name__, (plugin, stock), {"__doc__": plugin.__doc__})


def back_on_its_device(stock: Callable[[], None]) -> Callable[[], None]:
    """Return a `clear_cache` after which the thread's own GPU is current again."""

    @wraps(stock)
    def clear_cache() -> None:
        stock()
        mx.eval(mx.ones(1) + 1)  # MLX makes the GPU of an operation the thread's current GPU

    return clear_cache


PATCHES: tuple[Patch, ...] = (
    Patch(
        name="options",
        target="mlx_lm.server:argparse",
        why="The stock server has no --plugin, and plugins have options.",
        expect=(Uses("main", "argparse"),),
        replace=plugin_argparse,
        verify=probes.options_reach_plugins,
    ),
    Patch(
        name="model_provider",
        target="mlx_lm.server:ModelProvider",
        why="Plugins prepare for a model when it is loaded, and make the caches of this model.",
        expect=(
            Overrides("ModelProvider", PluginModelProvider, ("_load", "load", "load_default")),
            Uses("main", "ModelProvider"),
        ),
        replace=subclass(PluginModelProvider),
        verify=probes.loaded_models_make_plugin_caches,
    ),
    Patch(
        name="batch_generator",
        target="mlx_lm.server:BatchGenerator",
        why="Prompts are computed in chunks. Plugins save prompts and make batch caches.",
        expect=(
            Overrides(
                "BatchGenerator",
                PluginBatchGenerator,
                ("insert_segments", "next", "next_generated", "extract_cache", "remove"),
            ),
            Uses("BatchGenerator.insert_segments", "_unprocessed_sequences"),
            Uses("ResponseGenerator._generate", "BatchGenerator"),  # the next patch wraps this
        ),
        replace=plugin_batch_generator,
        verify=probes.batches_follow_plugins,
    ),
    Patch(
        name="response_generator",
        target="mlx_lm.server:ResponseGenerator",
        why="Plugins see messages before tokenizing and ids after it, and take requests.",
        expect=(
            Overrides(
                "ResponseGenerator",
                PluginResponseGenerator,
                ("_tokenize", "_next_request", "_generate", "generate", "_share_object"),
            ),
            Uses("ResponseGenerator.__init__", "requests"),
            Uses("ResponseGenerator._generate", "_next_request"),
            Uses("ResponseGenerator.generate", "requests"),
            Uses("run", "ResponseGenerator"),
        ),
        replace=subclass(PluginResponseGenerator),
        verify=probes.requests_pass_plugins,
    ),
    Patch(
        name="stream_generate",
        target="mlx_lm.server:stream_generate",
        why="The prompt of a request that is served alone is computed in chunks and saved.",
        expect=(Uses("ResponseGenerator", "stream_generate"),),
        replace=plugin_stream_generate,
        verify=probes.single_prompts_are_saved,
    ),
    Patch(
        name="prompt_cache",
        target="mlx_lm.server:LRUPromptCache",
        why="Plugins give and save prompt caches; in mlx-lm, a full match ends the server.",
        expect=(
            Overrides("LRUPromptCache", PluginPromptCache, ("fetch_nearest_cache", "insert_cache")),
        ),
        replace=subclass(PluginPromptCache),
        verify=probes.prompt_cache_asks_plugins,
    ),
    Patch(
        name="attention",
        target="mlx_lm.models.base:quantized_scaled_dot_product_attention",
        why="Caches attend over packed keys themselves; mlx-lm's attention is wrong for some keys.",
        expect=(
            Uses("scaled_dot_product_attention", "quantized_scaled_dot_product_attention"),
            Uses("scaled_dot_product_attention", "hasattr"),
        ),
        replace=plugin_quantized_attention,
        verify=probes.packed_keys_attend_themselves,
    ),
    Patch(
        name="wired_limit",
        target="mlx.core:set_wired_limit",
        why="Plugins choose how much macOS keeps wired; mlx-lm wires all it can, and Macs panic.",
        expect=(),
        replace=WiredLimit,
        verify=probes.wired_memory_is_chosen,
    ),
    Patch(
        name="http_server",
        target="mlx_lm.server:_run_http_server",
        why="Plugins see requests and replies, add headers, and answer additional paths.",
        expect=(
            Overrides(
                "APIHandler",
                PluginAPIHandler,
                (
                    *("do_POST", "validate_model_parameters", "handle_chat_completions"),
                    *("handle_text_completions", "handle_completion", "generate_response"),
                    *("completion_usage_response", "handle_models_request"),
                    *("handle_health_check", "_set_completion_headers", "_set_stream_headers"),
                ),
            ),
            Uses("run", "_run_http_server"),
        ),
        replace=plugin_run_http_server,
        verify=probes.http_reaches_plugins,
    ),
    Patch(
        name="run",
        target="mlx_lm.server:run",
        why="Plugins are configured and tested before the server listens, and end with the server.",
        expect=(Uses("main", "run"),),
        replace=plugin_run,
        verify=probes.run_starts_and_stops_plugins,
    ),
)

PRIVATE_NAMES: dict[str, Callable[..., None]] = {
    "ModelProvider._load": probes.loaded_models_make_plugin_caches,
    "ResponseGenerator._generate": probes.requests_pass_plugins,
    "ResponseGenerator._log_cache_stats": probes.requests_pass_plugins,
    "ResponseGenerator._next_request": probes.requests_pass_plugins,
    "ResponseGenerator._share_object": probes.requests_pass_plugins,
    "ResponseGenerator._stop": probes.requests_pass_plugins,
    "ResponseGenerator._tokenize": probes.requests_pass_plugins,
    "APIHandler._set_completion_headers": probes.http_reaches_plugins,
    "APIHandler._set_stream_headers": probes.http_reaches_plugins,
    "_run_http_server": probes.http_reaches_plugins,
    "BatchGenerator._unprocessed_sequences": probes.prompts_are_computed_in_turns,
    "GenerationBatch._next_logprobs": probes.drafts_are_checked,
    "GenerationBatch._next_tokens": probes.drafts_are_checked,
    "GenerationBatch._num_tokens": probes.drafts_are_checked,
    "GenerationBatch._step": probes.drafts_are_checked,
    "BatchRotatingKVCache._update_concat": probes.windows_are_in_order,
    "RotatingKVCache._idx": probes.windows_are_in_order,
    "RotatingKVCache._temporal_order": probes.windows_are_in_order,
}
"""Every private name of mlx-lm that this package uses, with its probe."""

SEVERAL_GPUS = Patch(
    name="several_gpus",
    target="mlx.core:clear_cache",
    why="It leaves its thread on the last CUDA GPU, where MLX cannot read the first GPU's buffers.",
    expect=(),
    replace=back_on_its_device,
    verify=probes.buffers_are_read_after_clearing,
)


def needed() -> tuple[Patch, ...]:
    return (*PATCHES, SEVERAL_GPUS) if mx.device_count(mx.gpu) > 1 else PATCHES
