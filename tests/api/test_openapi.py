"""The OpenAPI document has all our routes; the page about agents has all routes of agents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mlx_lm_kvpersist.api import agents, messages, responses
from mlx_lm_kvpersist.cache.geometry.precision import PrecisionChoice
from mlx_lm_kvpersist.config import Config
from mlx_lm_kvpersist.plugin import KVPersistPlugin
from mlx_lm_kvpersist.store.records import StoreLimits
from tests.support.host import REPOSITORY

PAGE = (REPOSITORY / "docs" / "api.md").read_text(encoding="utf-8")
DOCUMENT: Any = json.loads((REPOSITORY / "docs" / "openapi.json").read_text(encoding="utf-8"))
OF_OTHERS = {
    *(messages.MESSAGES_PATH, messages.COUNT_PATH, responses.RESPONSES_PATH),
    *messages.HELLO_PATHS,
}
"""Paths of APIs whose makers describe them."""


def described(path: str) -> set[str]:
    """Return a path's methods in the document."""
    return {name.upper() for name in DOCUMENT["paths"].get(path, ()) if name != "parameters"}


def test_every_route_is_described(tmp_path: Path) -> None:
    plugin = KVPersistPlugin()
    plugin._config = Config(tmp_path, StoreLimits(1, 1), PrecisionChoice())
    routes = {(route.method, route.path) for route in plugin.routes()}
    paths = {path for _, path in routes} - OF_OTHERS
    assert len(paths) >= 18 and set(DOCUMENT["paths"]) == paths
    for path in paths:
        served = {method for method, of in routes if of == path}
        # Paths of agents answer every method, most of them with 405.
        assert described(path) and described(path) <= served, path
        assert described(path) == served or len(served) == len(agents._METHODS), path


def test_every_request_of_agents_stands_in_the_page() -> None:
    paths = [path for path in DOCUMENT["paths"] if path.startswith(agents.AGENTS_PATH)]
    requests = [f"| `{method} {path}` |" for path in paths for method in described(path)]
    assert len(requests) == 7 and [one for one in requests if one not in PAGE] == []


def test_limits() -> None:
    listed = DOCUMENT["paths"][agents.AGENTS_PATH]["get"]["parameters"][0]["schema"]
    assert (listed["default"], listed["maximum"]) == (agents._PAGE, agents._MAX_PAGE)
    assert f"`?limit={agents._PAGE}` (at most {agents._MAX_PAGE})" in PAGE
    assert f"At most {agents.MAX_AGENTS:,} agents" in PAGE and agents.OPENAPI_PATH in PAGE
    name = DOCUMENT["components"]["schemas"]["NewAgent"]["properties"]["id"]
    assert name["pattern"] == f"^{agents._ID.pattern}$"
