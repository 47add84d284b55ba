"""The pages about clients, reuse and the API have every key source, reason and path."""

from __future__ import annotations

import html
import re
from pathlib import Path

from mlx_lm_kvpersist.api.messages import COUNT_PATH, HELLO_PATHS, MESSAGES_PATH
from mlx_lm_kvpersist.api.responses import RESPONSES_PATH
from mlx_lm_kvpersist.api.session_keys import SOURCES
from mlx_lm_kvpersist.host.http.server import is_alias
from mlx_lm_kvpersist.request.outcome import Reason

DOCS = Path(__file__).parents[2] / "docs"
CLIENTS = (DOCS / "clients.md").read_text(encoding="utf-8")
API = (DOCS / "api.md").read_text(encoding="utf-8")
REUSE = html.unescape((DOCS / "reuse.md").read_text(encoding="utf-8"))


def test_page_lists_the_sources_of_session_keys_in_order() -> None:
    places = [REUSE.find(f"| {source} |") for source in SOURCES]
    assert -1 not in places
    assert places == sorted(places)


def test_page_lists_every_reason_with_its_text() -> None:
    assert [
        reason for reason in Reason if f"| `{reason.word}` | {reason.text} |" not in REUSE
    ] == []


def test_client_setups_use_the_same_server_and_model_aliases() -> None:
    assert set(re.findall(r"127\.0\.0\.1:(\d+)", CLIENTS)) == {"8080"}
    assert 'base_url = "http://127.0.0.1:8080/v1"' in CLIENTS
    assert 'wire_api = "responses"' in CLIENTS
    assert "ANTHROPIC_BASE_URL=http://127.0.0.1:8080 " in CLIENTS
    names = re.findall(r"ANTHROPIC_(?:MODEL|DEFAULT_HAIKU_MODEL)=(\S+)", CLIENTS)
    assert len(names) == 2 and all(is_alias(name) for name in names)


def test_page_names_every_api_path() -> None:
    paths = (MESSAGES_PATH, COUNT_PATH, RESPONSES_PATH, *HELLO_PATHS)
    assert [path for path in paths if f" {path}`" not in API] == []
