"""The reasons for which blocks are in quarantine."""

from __future__ import annotations

import json

from .driving import Talk


def quarantined_reasons(talk: Talk) -> list[str]:
    """Return the reason for each block in quarantine; check that each reason has its block."""
    talk.store.drain()
    aside = talk.folder / "quarantine"
    reasons = []
    for path in sorted(aside.glob("*.json")):
        assert path.with_suffix(".safetensors").exists(), f"a reason without its block: {path}"
        reasons.append(json.loads(path.read_text())["reason"])
    assert len(reasons) == len(list(aside.glob("*.safetensors")))
    return reasons
