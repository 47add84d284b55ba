"""Patches of the host; a table of them is applied as a whole or not at all."""

from __future__ import annotations

import importlib
import inspect
import logging
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from ...errors import PatchNotEffective, SignatureChanged, TargetMissing

_ADVICE = (
    "update mlx-lm-kvpersist, or install a version of mlx-lm that it knows "
    "(mlx-lm-kvpersist doctor lists them)"
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Signature:
    """Expects that the host has `name`, with these parameters.

    name: a dotted name in the target's module. parameters: names and defaults, without annotations;
    a default that is not a literal is written `...`. may_grow: whether the replacement passes on
    what it does not know, so that the host may add parameters with defaults.
    """

    name: str
    parameters: str
    may_grow: bool = False

    def check(self, module: ModuleType) -> None:
        function = look_up(module, self.name)
        found = written_signature(function)
        if found != self.parameters and not (self.may_grow and self._grown(function)):
            raise SignatureChanged(
                f"{module.__name__}:{self.name} is {found} in this mlx-lm, expected "
                f"{self.parameters}; {_ADVICE}"
            )

    def _grown(self, function: Any) -> bool:
        """Tell whether this is the expected function with more parameters, all with defaults."""
        known = set(re.findall(r"\w+", self.parameters))
        parameters = inspect.signature(function).parameters.values()
        added = [each for each in parameters if each.name not in known]
        without = written_signature(function, without={each.name for each in added})
        return without == self.parameters and all(
            each.default is not each.empty or each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
            for each in added
        )


@dataclass(frozen=True)
class Uses:
    """Expects that the host's function `name` looks up the module global `uses` when it runs.

    Otherwise replacing the global would have no effect.
    """

    name: str
    uses: str

    def check(self, module: ModuleType) -> None:
        function = look_up(module, self.name)
        code = getattr(inspect.unwrap(function), "__code__", None)
        if code is None or self.uses not in names_in(code):
            raise SignatureChanged(
                f"{module.__name__}:{self.name} no longer uses {self.uses}; {_ADVICE}"
            )


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
    expect: tuple[Signature | Uses, ...]
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

    def apply(self) -> Applied:
        """Replace the target, after checking the host."""
        self.check_host()
        original = getattr(self.module, self.attribute)
        setattr(self.module, self.attribute, self.replace(original))
        logger.debug("patched %s: %s", self.target, self.why)
        return Applied(self, original)


@dataclass(frozen=True)
class Applied:
    """A patch that is in place, and the original that it replaced."""

    patch: Patch
    original: Any

    def undo(self) -> None:
        setattr(self.patch.module, self.patch.attribute, self.original)


class PatchSet:
    """The patches in place in this process."""

    def __init__(self) -> None:
        self._applied: list[Applied] = []

    @property
    def is_applied(self) -> bool:
        return bool(self._applied)

    def apply(self, patches: Sequence[Patch]) -> None:
        """Apply all patches, or none: the first that fails undoes those before it.

        Those that are in place already stay as they are.
        """
        patches = [each for each in patches if all(each is not one.patch for one in self._applied)]
        try:
            # The whole host is checked before the first patch changes any of it.
            for patch in patches:
                patch.check_host()
            for patch in patches:
                self._applied.append(patch.apply())
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Put the originals back, the last one first."""
        while self._applied:
            self._applied.pop().undo()


PATCH_SET = PatchSet()


def look_up(module: ModuleType, name: str) -> Any:
    """Return `module.name` for a dotted name; raises TargetMissing where a part is missing."""
    found: Any = module
    for part in name.split("."):
        try:
            found = getattr(found, part)
        except AttributeError:
            raise TargetMissing(
                f"{module.__name__}:{name} is missing in this mlx-lm; {_ADVICE}"
            ) from None
    return found


def written_signature(function: Any, without: Collection[str] = ()) -> str:
    """Return a function's parameters as text that does not depend on the Python version."""
    parameters = []
    for name, parameter in inspect.signature(function).parameters.items():
        if name in without:
            continue
        default = parameter.default
        if default is not parameter.empty and not isinstance(
            default, (int, float, str, type(None))
        ):
            # The repr of a class contains its module, that of an object its address.
            parameter = parameter.replace(default=Ellipsis)
        parameters.append(parameter.replace(annotation=parameter.empty))
    return str(inspect.Signature(parameters)).replace("Ellipsis", "...")


def names_in(code: Any) -> set[str]:
    """Return the names that a function and the functions inside it look up."""
    names = set(code.co_names)
    for constant in code.co_consts:
        if hasattr(constant, "co_names"):
            names |= names_in(constant)
    return names
