"""The mutants that `make mutate` makes, and the mutants that may survive."""

from __future__ import annotations

from pathlib import Path

from tools.mutate import FOLDERS, PACKAGE, ROOT, accepted_mutants, mutants_of, targets_of

SOURCE = """
def f(a: int, b: "1 < 2") -> int:
    \"\"\"Not 1.\"\"\"
    if a < b and not b:
        return a + 1
    for x in g(a, b, strict=True):
        continue
    drop(x)
    raise ValueError(f"{a + 1}")
"""


def mutated_lines(tmp_path: Path) -> set[str]:
    path = tmp_path / "source.py"
    path.write_text(SOURCE, encoding="utf-8")
    lines = set()
    for mutant in mutants_of(path, tmp_path):
        changed = SOURCE.encode()[: mutant.start] + mutant.after.encode()
        changed += SOURCE.encode()[mutant.stop :]
        compile(changed, "source.py", "exec")
        (line,) = (
            after.strip()
            for before, after in zip(SOURCE.split("\n"), changed.decode().split("\n"), strict=True)
            if before != after
        )
        lines.add(line)
    return lines


def test_mutants_are_single_changes_of_executed_code(tmp_path: Path) -> None:
    assert mutated_lines(tmp_path) == {
        "if (a <= b) and not b:",
        "if (a < b or not b):",
        "if (not b):",
        "if (a < b):",
        "if a < b and (b):",
        "if (False):",
        "if (True):",
        "return (a - 1)",
        "return a + (2)",
        "return None",
        "for x in (g(b, a, strict=True)):",
        "pass",
    }


def test_mutants_of_equal_lines_have_different_keys(tmp_path: Path) -> None:
    path = tmp_path / "source.py"
    path.write_text("x = 1\nx = 1\n", encoding="utf-8")
    before = [mutant.key for mutant in mutants_of(path, tmp_path)]
    path.write_text("y = z\nx = 1\nx = 1\n", encoding="utf-8")
    assert before == [mutant.key for mutant in mutants_of(path, tmp_path)]
    assert len(set(before)) == 2


def test_target_tests_of_every_module_exist() -> None:
    for folder in FOLDERS:
        for path in sorted((ROOT / PACKAGE / folder).rglob("*.py")):
            targets = targets_of(str(path.relative_to(ROOT)))
            tests = [target for target in targets if target.startswith("tests/")]
            assert tests and all((ROOT / test).exists() for test in tests), (path, targets)


def test_accepted_mutants_exist_in_the_source_with_a_reason() -> None:
    for accepted in accepted_mutants():
        source = (ROOT / accepted["file"]).read_text(encoding="utf-8")
        assert accepted["line"] in [line.strip() for line in source.split("\n")], accepted
        assert accepted["reason"]
