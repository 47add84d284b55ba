"""What is known about mlx-lm's architectures without running them: facts that ship as data.

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
from ...ranks import ranks
from .precision import PrecisionChoice
from .spec import ModelCacheSpec

FILE = Path(__file__).with_name("architectures.json")

_MODELS = "mlx_lm.models."


@dataclass(frozen=True)
class Architecture:
    """The facts of one module of `mlx_lm.models`; they hold for every model of it.

    `batches`: replies to prompts of unequal length may be decoded in one batch. `joins`: their
    prompts may be computed in one call, too. `packed`: all layers whose keys are quantized attend
    over packed keys with the result of dequantized keys. `refused`: why its conversations cannot
    be kept, "" if they can; a cache class that is not supported is no reason here, but one of
    `ModelCacheSpec.probe`.
    """

    batches: bool
    joins: bool
    packed: bool
    refused: str = ""


def architecture_of(model: Any) -> Architecture | None:
    """Return the facts of a model's architecture, or None if nothing is proven about it.

    Nothing is proven about a class from outside `mlx_lm.models`, about a module that the file does
    not name, and about a version of mlx-lm that is not a release in the file.

    Raises:
        KVPersistError: the package is damaged: the file is missing, or is not what was written.
    """
    module = str(model.__class__.__module__)  # a proxy answers for its model
    if not module.startswith(_MODELS):
        return None
    installed = distribution("mlx-lm")
    is_snapshot = installed.read_text("direct_url.json") is not None  # with any number
    versions, architectures = known()
    if is_snapshot or installed.version not in versions:
        return None
    return architectures.get(module.removeprefix(_MODELS))


@cache
def known() -> tuple[tuple[str, ...], dict[str, Architecture]]:
    """Return the versions of mlx-lm that the facts are proven for, and the facts by module.

    Raises KVPersistError as `architecture_of` does.
    """
    try:
        content = json.loads(FILE.read_text(encoding="utf-8"))
        facts = {name: Architecture(**its) for name, its in content["architectures"].items()}
        return tuple(content["mlx_lm"]), facts
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise KVPersistError(
            f"{FILE} cannot be used ({type(error).__name__}: {error}); "
            "install the package again: pip install --force-reinstall mlx-lm-kvpersist"
        ) from error


def facts_of(model: Any) -> Architecture | None:
    """Return the facts about a model's architecture; None if this or another rank has none."""
    facts = architecture_of(model)
    return facts if ranks().same(repr(facts), "the facts of the architecture") else None


def spec_of(model: Any, choice: PrecisionChoice, facts: Architecture | None) -> ModelCacheSpec:
    """Return how a model's caches are kept in a precision, and what is computed together.

    Without `facts`, replies are batched if stock batches them, and prompts are computed one by one.

    Raises ModelNotSupported if the caches cannot be kept.
    """
    if facts is not None and facts.refused:
        raise ModelNotSupported(facts.refused)
    spec = ModelCacheSpec.probe(model, choice)
    batches, joins = (facts.batches, facts.joins) if facts is not None else (True, False)
    return replace(spec, batches=batches, joins=joins)
