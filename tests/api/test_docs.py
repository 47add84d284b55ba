"""The page about clients names every source, normalisation and reason."""

from __future__ import annotations

from pathlib import Path

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
