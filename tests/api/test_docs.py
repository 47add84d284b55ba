"""The page about clients names every source, normalisation and reason."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from mlx_lm_kvpersist.api.normalise import NORMALISATIONS
from mlx_lm_kvpersist.api.session_keys import SOURCES
from mlx_lm_kvpersist.request.outcome import Reason

PAGE = (Path(__file__).parents[2] / "docs" / "clients.md").read_text(encoding="utf-8")


def test_sources_in_their_order() -> None:
    places = [PAGE.find(f"| {source.name} |") for source in SOURCES]
    assert -1 not in places
    assert places == sorted(places)


def test_normalisations() -> None:
    assert [name for name in NORMALISATIONS if f"| `{name}` |" not in PAGE] == []


def test_reasons() -> None:
    assert [r for r in Reason if f"| `{r.word}` | {r.text} |" not in PAGE] == []


def test_c7_the_setup_for_litellm_fits_together() -> None:
    """`openai/` fails, and Claude Code wants a name that begins with "claude"."""
    source = re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    assert source is not None
    models: list[Any] = yaml.safe_load(source[1])["model_list"]
    prefixes = {each["model_name"]: each["litellm_params"]["model"] for each in models}
    assert {name: model.partition("/")[0] for name, model in prefixes.items()} == {
        "claude-local": "hosted_vllm",
        "codex-local": "lm_studio",
    }
    assert {each["litellm_params"]["api_base"] for each in models} == {"http://127.0.0.1:8080/v1"}
    ports = set(re.findall(r"127\.0\.0\.1:(\d+)", PAGE)) - {"8080"}
    assert ports == set(re.findall(r"litellm .*--port (\d+)", PAGE)) == {"4000"}
    assert "ANTHROPIC_MODEL=claude-local" in PAGE and 'model = "codex-local"' in PAGE
    assert 'wire_api = "responses"' in PAGE


def test_c7_what_keeps_no_cache_is_what_the_plugin_refuses() -> None:
    """Sliding windows and recurrent states are kept; the page said that they were not."""
    section = PAGE[PAGE.index("## What keeps no cache") : PAGE.index("## Why was this")]
    assert "KVCache" not in section and "draft model" in section and "images" in section
