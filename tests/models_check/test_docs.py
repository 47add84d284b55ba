"""docs/models.md shows every model of the zoo, and every module that is not in it."""

from __future__ import annotations

from pathlib import Path

from models_check.configs import CONFIGS, NOT_IN_THE_ZOO
from models_check.report import line, page, summary
from models_check.sweep import Finding

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")


def test_every_model_has_a_row() -> None:
    assert [name for name in CONFIGS if f"\n| `{name}` |" not in PAGE] == []


def test_nothing_is_listed_that_the_zoo_has_not() -> None:
    rows = [row.split("`")[1] for row in PAGE.splitlines() if row.startswith("| `")]
    assert rows == list(CONFIGS)


def test_every_other_module_is_named_with_its_reason() -> None:
    assert [name for name, why in NOT_IN_THE_ZOO.items() if f"- `{name}`: {why}." not in PAGE] == []


def test_a_page_says_what_was_found() -> None:
    kept = Finding("llama", "equal", caches="2 full", reused=[0, 9], possible=[0, 9])
    kept.differences, kept.excused = {"restored": 2e-7}, {"in a batch": 0.5}
    wrong = Finding("mamba", "WRONG", "rewound: logits 1.0e+00 apart")
    text = page([kept, wrong])
    assert "| `llama` | 2 full |  | all |  | equal | 2e-07 |  |  |  |" in text
    assert "- `llama`: in a batch 5e-01." in text
    assert "- `mamba`: rewound: logits 1.0e+00 apart." in text
    assert summary([kept, wrong]) == "2 models of 2 modules: 1 WRONG, 1 equal"
    assert "rewound" in line(wrong)
