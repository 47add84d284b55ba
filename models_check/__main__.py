"""`python -m models_check`: sweep the zoo, one process per name, and print or write a table."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from .configs import available, module_of
from .report import line, page, summary
from .sweep import FINE, Finding, sweep

_TIMEOUT_S = 120


def main(argv: Sequence[str]) -> int:
    """Return 0 when nothing is wrong but stock."""
    parser = argparse.ArgumentParser(prog="python -m models_check", description=__doc__)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="names or modules; all if absent")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time (%(default)s)")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="write the table as Markdown")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the findings as JSON")
    parser.add_argument("--here", action="store_true", help="in this process, one after another")
    args = parser.parse_args(argv)
    names = [
        name
        for name in available()
        if not args.only or name in args.only or module_of(name) in args.only
    ]
    if not names:
        parser.error(f"the zoo has none of {', '.join(args.only)}")
    findings = []
    for finding in map(sweep, names) if args.here else _in_processes(names, args.jobs):
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


def _in_processes(names: Sequence[str], jobs: int) -> Iterator[Finding]:
    """Yield findings as they come; a process that dies or hangs is a finding of its own."""
    with ThreadPoolExecutor(jobs) as pool:
        for done in as_completed([pool.submit(_in_a_process, name) for name in names]):
            yield done.result()


def _in_a_process(name: str) -> Finding:
    command = [sys.executable, "-m", "models_check.one", name]
    try:
        run = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Finding(name, "hung", f"no result after {_TIMEOUT_S} s")
    if run.returncode != 0:
        last = (run.stderr.strip().splitlines() or ["no message"])[-1]
        return Finding(name, "crashed", f"exit status {run.returncode}: {last}")
    found = Finding(**json.loads(run.stdout.splitlines()[-1]))
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
