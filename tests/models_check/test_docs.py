"""docs/models.md shows every model of the zoo, and every module that is not in it."""

from __future__ import annotations

import re
from pathlib import Path

from models_check.configs import CONFIGS
from models_check.report import line, page, summary
from models_check.sweep import Finding

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")


def models_on_page() -> list[str]:
    """Return the models in the table and the refused models."""
    rows = [line for line in PAGE.splitlines() if line.endswith("` |")]
    refused = PAGE[PAGE.index("## Refused, or wrong") : PAGE.index("## As in stock")]
    in_rows = [name for row in rows for name in re.findall(r"`([^`]+)`", row.split(" | ")[3])]
    return in_rows + re.findall(r"^- `([^`]+)`", refused, re.MULTILINE)


def test_the_page_names_every_model_of_the_zoo_once() -> None:
    assert sorted(models_on_page()) == sorted(CONFIGS)


def test_the_page_lists_results_differences_and_faults() -> None:
    batched = "prompts and replies"
    plain = Finding("llama", "equal", caches="2 full", reusable="by blocks", batching=batched)
    plain.differences, plain.excused = {"restored": 2e-7}, {"in a batch": 0.5}
    same_row = Finding("qwen3", "equal", caches="1 full", reusable="by blocks", batching=batched)
    mixed = Finding("gemma3", "equal", caches="1 sliding 16, 1 full", reusable="70 of 87")
    wrong = Finding("mamba", "WRONG", "rewound: logits 1.0e+00 apart", caches="2 recurrent")
    text = page([plain, mixed, same_row, wrong])
    assert "| full attention | a multiple of 256 | prompts and replies | `llama`, `qwen3` |" in text
    assert "| full attention, sliding windows | a checkpoint |  | `gemma3` |" in text
    assert "`mamba` |" not in text
    assert "The largest difference of an equal model is 2e-07, except" in " ".join(text.split())
    assert "- `llama`: in a batch 5e-01." in text
    assert "- `mamba`: rewound: logits 1.0e+00 apart." in text
    assert summary([plain, wrong]) == "2 models of 2 modules: 1 WRONG, 1 equal"
    assert "rewound" in line(wrong)
