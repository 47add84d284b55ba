"""The page about agents has every path, and the document the code's limits."""

from __future__ import annotations

import json
from typing import Any

from mlx_lm_kvpersist.api import agents
from tests.support.host import REPOSITORY

PAGE = (REPOSITORY / "docs" / "agents.md").read_text(encoding="utf-8")
DOCUMENT: Any = json.loads((REPOSITORY / "docs" / "openapi.json").read_text(encoding="utf-8"))


def test_every_request_stands_in_the_page() -> None:
    requests = [
        f"| `{method.upper()} {path}` |"
        for path, operations in DOCUMENT["paths"].items()
        for method in operations
        if method != "parameters"
    ]
    assert len(requests) == 7 and [one for one in requests if one not in PAGE] == []


def test_limits() -> None:
    listed = DOCUMENT["paths"][agents.AGENTS_PATH]["get"]["parameters"][0]["schema"]
    assert (listed["default"], listed["maximum"]) == (agents._PAGE, agents._MAX_PAGE)
    assert f"`?limit={agents._PAGE}` (at most {agents._MAX_PAGE})" in PAGE
    assert f"At most {agents.MAX_AGENTS:,} agents" in PAGE and agents.OPENAPI_PATH in PAGE
    name = DOCUMENT["components"]["schemas"]["NewAgent"]["properties"]["id"]
    assert name["pattern"] == f"^{agents._ID.pattern}$"
