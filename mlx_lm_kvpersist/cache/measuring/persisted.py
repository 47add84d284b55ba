"""What was measured is persisted, so that it is measured once."""

from __future__ import annotations

from typing import Any, Protocol


class Persisted(Protocol):
    """JSON values by key that outlive the process; the store implements it.

    A key names all that a value depends on, and the format of the value. So a result for another
    device, or in another format, is not found.
    """

    def get(self, key: str) -> Any:
        """Return a value; None where there is none, or none that can be read."""

    def put(self, key: str, value: Any) -> None:
        """Write a value, in place of any before."""
