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
FOREIGN_PATHS = {
    *(messages.MESSAGES_PATH, messages.COUNT_PATH, responses.RESPONSES_PATH),
    *messages.HELLO_PATHS,
}
"""Paths of APIs that their makers document."""


def described(path: str) -> set[str]:
    """Return a path's methods in the document."""
    return {name.upper() for name in DOCUMENT["paths"].get(path, ()) if name != "parameters"}


def test_openapi_document_describes_every_route(tmp_path: Path) -> None:
    plugin = KVPersistPlugin()
    plugin._config = Config(tmp_path, StoreLimits(1, 1), PrecisionChoice())
    routes = {(route.method, route.path) for route in plugin.routes()}
    paths = {path for _, path in routes} - FOREIGN_PATHS
    assert len(paths) >= 18 and set(DOCUMENT["paths"]) == paths
    for path in paths:
        served = {method for method, route_path in routes if route_path == path}
        # Paths of agents answer every method, most methods with 405.
        assert described(path) and described(path) <= served, path
        assert described(path) == served or len(served) == len(agents._METHODS), path


def test_page_lists_every_request_of_agents() -> None:
    paths = [path for path in DOCUMENT["paths"] if path.startswith(agents.AGENTS_PATH)]
    requests = [f"| `{method} {path}` |" for path in paths for method in described(path)]
    assert len(requests) == 7 and [request for request in requests if request not in PAGE] == []


def test_documented_limits_match_the_code() -> None:
    listed = DOCUMENT["paths"][agents.AGENTS_PATH]["get"]["parameters"][0]["schema"]
    assert (listed["default"], listed["maximum"]) == (agents._PAGE, agents._MAX_PAGE)
    assert f"`?limit={agents._PAGE}` (at most {agents._MAX_PAGE})" in PAGE
    assert f"At most {agents.MAX_AGENTS:,} agents" in PAGE and agents.OPENAPI_PATH in PAGE
    name = DOCUMENT["components"]["schemas"]["NewAgent"]["properties"]["id"]
    assert name["pattern"] == f"^{agents._ID.pattern}$"
