"""Patches of the host: a table of patches is applied completely or not at all."""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ...errors import PatchNotEffective, SignatureChanged, TargetMissing

_ADVICE = (
    "update mlx-lm-kvpersist, or install a version of mlx-lm that it knows "
    "(mlx-lm-kvpersist doctor lists them)"
)

_REST = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Overrides:
    """Expects that a class of the host has the methods that `by` overrides, and calls them alike.

    Our method takes every parameter of stock's method, by name or with `*args` and `**kwargs`, and
    takes no other parameter. A parameter that is taken with `*args` or `**kwargs` must have a
    default. A parameter that both methods name has the same default.
    """

    name: str
    by: type[Any]
    methods: tuple[str, ...]

    def check(self, module: ModuleType) -> None:
        for method in self.methods:
            stock = look_up(module, name := f"{self.name}.{method}")
            theirs = inspect.signature(stock).parameters
            own = inspect.signature(getattr(self.by, method))
            named = [key for key, value in own.parameters.items() if value.kind not in _REST]
            added = [parameter for parameter in theirs.values() if parameter.name not in named]
            takes_rest = len(named) < len(own.parameters)
            if (
                [name for name in theirs if name in named] != named
                or any(theirs[name].default != own.parameters[name].default for name in named)
                or not all(
                    parameter.kind in _REST
                    or (takes_rest and parameter.default is not parameter.empty)
                    for parameter in added
                )
            ):
                raise SignatureChanged(
                    f"{module.__name__}:{name} is {inspect.signature(stock)} in this mlx-lm, "
                    f"expected {own}; {_ADVICE}"
                )


@dataclass(frozen=True)
class Uses:
    """Expects that the host's function `name` looks up the module global `uses` when it runs.

    If `name` is a class, one of its methods must use the global. Otherwise replacing the global
    would have no effect.
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

    target: "module:name". why: its purpose, in a sentence for users. expect: what must be true of
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
        """Put the originals back, the last one first."""
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
