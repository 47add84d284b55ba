"""Work that is done in steps, so that a request can come between two of them."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeVar

Result = TypeVar("Result")
Steps = Generator[None, None, Result]
"""A step ends at a yield. It takes about as long as a few tokens of a reply."""


def completed(steps: Steps[Result]) -> Result:
    """Do all steps at once; return the result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: Result = end.value
            return result
