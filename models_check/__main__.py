"""`python -m models_check`: test every model of the zoo, and print or write a table.

Each model has a process of its own. With `--facts`, only the facts that ship with the package are
evaluated.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path

from .configs import available, module_of
from .report import line, page, summary
from .sweep import FINE, Finding, sweep

_TIMEOUT_S = 120


def main(argv: Sequence[str]) -> int:
    """Return 0 if the plugin has no faults; faults of stock do not count."""
    parser = argparse.ArgumentParser(prog="python -m models_check", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="names or modules (default: all)")
    parser.add_argument("--jobs", type=int, default=2, help="number of processes (%(default)s)")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the table as Markdown")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings as JSON")
    parser.add_argument("--here", action="store_true", help="run all tests in this process")
    parser.add_argument(
        "--unknown", action="store_true", help="test as if the package had no facts"
    )
    parser.add_argument(
        "--facts",
        choices=("check", "write"),
        help="evaluate the facts about all architectures. check: evaluate with the oldest and the "
        "newest mlx-lm, and compare the facts with the package's; write: evaluate with every "
        "mlx-lm, and write the facts",
    )
    parser.add_argument(
        "--every-version", action="store_true", help="with --facts check: use every mlx-lm"
    )
    parser.add_argument("--seed", type=int, default=0, help="with --facts: the seed of the weights")
    args = parser.parse_args(argv)
    if args.facts:
        return _facts(args)
    names = [
        name
        for name in available()
        if not args.only or name in args.only or module_of(name) in args.only
    ]
    if not names:
        parser.error(f"the zoo has none of {', '.join(args.only)}")
    findings = []
    run = partial(sweep if args.here else _in_a_process, unknown=args.unknown)
    for finding in map(run, names) if args.here else _in_processes(names, args.jobs, run):
        findings.append(finding)
        print(line(finding), flush=True)
    findings.sort(key=lambda finding: finding.name)
    print(summary(findings))
    if args.json:
        text = json.dumps([finding.to_json() for finding in findings], indent=1)
        args.json.write_text(text + "\n", encoding="utf-8")
    if args.write:
        args.write.write_text(page(findings), encoding="utf-8")
    return int(any(finding.result not in FINE for finding in findings))


def _facts(args: argparse.Namespace) -> int:
    from . import facts_file  # needs packages that only developers have

    if args.facts == "write":
        failures = facts_file.write(args.jobs, args.seed)
    else:
        failures = facts_file.check(args.jobs, args.seed, every_version=args.every_version)
    for failure in failures:
        print(failure)
    if failures and args.facts == "check":
        print("if the change is right, run python -m models_check --facts write")
    return int(bool(failures))


def _in_processes(
    names: Sequence[str], jobs: int, run: Callable[[str], Finding]
) -> Iterator[Finding]:
    """Yield each finding when its model's process ends."""
    with ThreadPoolExecutor(jobs) as pool:
        for done in as_completed([pool.submit(run, name) for name in names]):
            yield done.result()


def _in_a_process(name: str, *, unknown: bool = False) -> Finding:
    """A process that dies or hangs is a finding, too."""
    command = [sys.executable, "-m", "models_check.one", name, *["unknown"] * unknown]
    try:
        run = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Finding(name, "hung", f"no result after {_TIMEOUT_S} s")
    if run.returncode != 0:
        last = (run.stderr.strip().splitlines() or ["no message"])[-1]
        return Finding(name, "crashed", f"exit status {run.returncode}: {last}")
    finding = Finding(**json.loads(run.stdout.splitlines()[-1]))
    return finding


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
