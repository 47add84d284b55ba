"""What is persisted, in memory: values as JSON gives them back."""

from __future__ import annotations

import json
from typing import Any


class InMemory(dict[str, Any]):
    def put(self, key: str, value: Any) -> None:
        self[key] = json.loads(json.dumps(value))

    def under(self, prefix: str) -> dict[str, Any]:
        return {key[len(prefix) :]: self[key] for key in self if key.startswith(prefix)}
