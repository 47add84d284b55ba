"""A picture of a terminal: runs a command and draws what it prints.

`python -m tools.docs.terminal docs/demo.svg -- COMMAND …`; `make picture` draws that of the README.
"""

from __future__ import annotations

import argparse
import io
import re
import shlex
import subprocess
from pathlib import Path

from rich.console import Console
from rich.text import Text

_COLUMNS = 124
_FONT_FACE = re.compile(r"\s*@font-face \{.*?\}", re.DOTALL)


def picture(title: str, output: str) -> str:
    """Return an SVG of `output`, with the fonts of whoever looks at it, and no script."""
    console = Console(record=True, width=_COLUMNS, file=io.StringIO(), highlight=False)
    console.print(Text.from_ansi(output.rstrip("\n")))
    drawn = console.export_svg(title=title, unique_id="terminal")
    drawn = _FONT_FACE.sub("", drawn).replace("Fira Code", "Menlo, Consolas, DejaVu Sans Mono")
    return "\n".join(line.rstrip() for line in drawn.splitlines()) + "\n"


def main() -> None:
    """Run the command, show what it prints, and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--title")
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    done = subprocess.run(args.command, stdout=subprocess.PIPE, text=True, check=True)
    print(done.stdout, end="")
    title = args.title or shlex.join(args.command)
    args.file.write_text(picture(title, done.stdout), encoding="utf-8")


if __name__ == "__main__":
    main()
