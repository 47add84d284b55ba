"""`python -m patches_check`: check all changes to the mlx-lm that is installed here.

The exit status is 0 if nothing is wrong. `--matrix run` makes and checks virtual environments with
other versions, and writes the bounds and the documentation's table from the results.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from .installed import examine, print_report


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m patches_check", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument(
        "--conversation",
        action="store_true",
        help="also start a server, chat, kill -9 it, restart it and continue the chat",
    )
    parser.add_argument(
        "--own-tests",
        action="store_true",
        help="run mlx-lm's own tests of its server with all changes in place, for the oldest and "
        "the newest version; nothing else is checked",
    )
    parser.add_argument(
        "--matrix",
        choices=("print", "run", "write"),
        help="print: print the rows of versions.toml; run: check them; write: only write the table "
        "and the bounds again from supported.json",
    )
    parser.add_argument(
        "--row",
        type=int,
        action="append",
        metavar="N",
        help="with --matrix run: check only this row, counted from 1, and write nothing; can be "
        "given more than once; 0: check no row, only --checkout",
    )
    parser.add_argument(
        "--checkout",
        type=Path,
        metavar="PATH",
        help="with --matrix run: also check the mlx-lm in this folder, which may fail",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        metavar="PATH",
        help="with --matrix run: make the environments in this folder, and keep them (default: a "
        "temporary folder)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="with --matrix run: write the outcome to FILE, and change neither supported.json nor "
        "the files that are written from it",
    )
    args = parser.parse_args(argv)
    if args.own_tests:
        from . import own_tests  # needs packages that only developers have

        failures = own_tests.run()
        for failure in failures:
            print(failure)
        return int(bool(failures))
    if args.matrix is None:
        report = examine(with_conversation=args.conversation)
        if args.json:
            print(json.dumps(report.to_json(), indent=2))
        else:
            print_report(report)
        return int(bool(report.failures))

    from . import matrix, supported  # needs packages that the environment of a row lacks

    if args.matrix == "print":
        print(json.dumps([row.to_json() for row in matrix.rows()], indent=1))
        return 0
    if args.matrix == "write":
        supported.write(supported.read())
        return 0
    outcomes = matrix.run(args.row, args.checkout, args.folder)
    matrix.print_outcomes(outcomes)
    if args.output:
        supported.save(outcomes, args.output)
    elif not args.row:
        supported.save(outcomes)
        if all(outcome.is_expected for outcome in outcomes):
            supported.write(supported.read())
    return int(not all(outcome.is_expected for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
