"""Facts about mlx-lm's architectures that ship as data, so that no model is run to find them.

`python -m models_check --facts write` evaluates a tiny model of every architecture and writes
`architectures.json`. CI does so again, and fails if the file says anything else.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from ...errors import KVPersistError, ModelNotSupported
from .precision import PrecisionChoice
from .probe import probe_model
from .spec import ModelCacheSpec

FILE = Path(__file__).with_name("architectures.json")
_MODELS = "mlx_lm.models."


@dataclass(frozen=True)
class Architecture:
    """The facts of one module of `mlx_lm.models`; they hold for every model of the module.

    `batches`: replies to prompts of unequal length may be decoded in one batch. `joins`: their
    prompts may be computed in one call, too. `packed`: a layer that calls attention over its
    packed keys (`packed_shapes` traces this) gets the result of dequantized keys. `refused`: why
    its conversations cannot be kept, "" if they can; classes of caches are `probe_model`'s matter.
    """

    batches: bool
    joins: bool
    packed: bool
    refused: str = ""

    def applied_to(self, spec: ModelCacheSpec) -> ModelCacheSpec:
        """Return the spec of a model of this architecture, with `batches` and `joins`.

        Raises ModelNotSupported if the architecture is refused.
        """
        if self.refused:
            raise ModelNotSupported(f"its architecture cannot be kept: {self.refused}")
        return replace(spec, batches=self.batches, joins=self.joins)


def architecture_of(model: Any) -> Architecture | None:
    """Return the facts of a model's architecture, or None if nothing is proven about it.

    Nothing is proven about a class from outside `mlx_lm.models`, and about a module or a release of
    mlx-lm that the file does not name. Raises KVPersistError if the file is missing or damaged.
    """
    module = str(model.__class__.__module__)  # a proxy answers for its model
    if not module.startswith(_MODELS):
        return None
    installed = distribution("mlx-lm")
    source = json.loads(installed.read_text("direct_url.json") or "{}")
    if "vcs_info" in source or source.get("dir_info", {}).get("editable"):
        return None  # a snapshot, which has the number of a release
    return known().get(installed.version, {}).get(module.removeprefix(_MODELS))


@cache
def known() -> dict[str, dict[str, Architecture]]:
    """Return the facts by version of mlx-lm, and by module; see `architecture_of`."""
    try:
        content = json.loads(FILE.read_text(encoding="utf-8"))
        newest = _read(content["architectures"])
        older = {version: newest | _read(facts) for version, facts in content["older"].items()}
        return {content["newest"]: newest, **older}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise KVPersistError(
            f"{FILE} cannot be used ({type(error).__name__}: {error}); "
            "install the package again: pip install --force-reinstall mlx-lm-kvpersist"
        ) from error


def _read(facts: dict[str, dict[str, Any]]) -> dict[str, Architecture]:
    return {module: Architecture(**fields) for module, fields in facts.items()}


def spec_of(model: Any, choice: PrecisionChoice, facts: Architecture | None) -> ModelCacheSpec:
    """Return how a model's caches are kept in a precision, and what is computed together.

    If `facts` is None, replies are batched as in stock, and prompts are never computed together.
    Raises ModelNotSupported if the caches cannot be kept.
    """
    spec = probe_model(model, choice)
    return spec if facts is None else facts.applied_to(spec)
