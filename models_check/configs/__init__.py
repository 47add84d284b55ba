"""One or more tiny configurations for each architecture that mlx-lm has.

The name of a configuration is its module's name, followed by "/variant" if a module has several.
Facts about which keys an architecture needs come from its `ModelArgs` and from mlx-lm's own tests.
"""

from __future__ import annotations

import importlib.util
import pkgutil
from typing import Any

from mlx_lm_kvpersist.host.patching import versions

from . import composite, full, recurrent, sliding

__all__ = ["CONFIGS", "NOT_IN_THE_ZOO", "available", "installed_modules", "module_of"]

CONFIGS: dict[str, dict[str, Any]] = dict(
    sorted({**full.CONFIGS, **sliding.CONFIGS, **recurrent.CONFIGS, **composite.CONFIGS}.items())
)

NOT_IN_THE_ZOO = {
    "activations": "activation functions",
    "base": "attention and masks that all architectures share",
    "bitlinear_layers": "layers of bitnet",
    "cache": "cache classes",
    "gated_delta": "a recurrence that several architectures share",
    "olmo": "the model returns a pair, and mlx-lm cannot generate with pairs",
    "mla": "projections of latent attention",
    "pipeline": "distribution over machines",
    "rope_utils": "rotary embeddings",
    "ssm": "a recurrence that several architectures share",
    "switch_layers": "layers of experts",
}
"""Modules of `mlx_lm.models` that are not an architecture, or cannot run, and why."""

_NOT_BEFORE = {"phi3small": (0, 32, 1)}
"""Modules that write outside their arrays in older versions of mlx-lm, and may end the process."""


def module_of(name: str) -> str:
    return name.partition("/")[0]


def installed_modules() -> list[str]:
    spec = importlib.util.find_spec("mlx_lm.models")
    assert spec is not None and spec.submodule_search_locations is not None
    return sorted(module.name for module in pkgutil.iter_modules(spec.submodule_search_locations))


def available() -> list[str]:
    """Return the zoo's names that the installed mlx-lm can run."""
    version = versions.parse(versions.installed("mlx-lm"))
    modules = {
        module for module in installed_modules() if version >= _NOT_BEFORE.get(module, version)
    }
    return [name for name in CONFIGS if module_of(name) in modules]
