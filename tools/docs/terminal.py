"""A program in its own terminal, and a picture of its screen."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import select
import signal
import struct
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pyte
from rich.console import Console
from rich.text import Text

_COLOURS = {"brown": "yellow", "brightbrown": "bright_yellow", "default": ""}
_FONT_FACE = re.compile(r"\s*@font-face \{.*?\}", re.DOTALL)
_SIZE = re.compile(r'viewBox="0 0 ([\d.]+) ([\d.]+)"')
_GAP = 12.0


class Terminal:
    """A program in a terminal of `rows` and `columns`, for a `with` block."""

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        env: Mapping[str, str],
        columns: int = 112,
        rows: int = 40,
    ) -> None:
        self._screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self._screen)
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            os.chdir(folder)
            os.execvpe(command[0], list(command), {**env, "TERM": "xterm-256color"})
        fcntl.ioctl(self._fd, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self._screen.display]

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())
        self.read(1.0)  # a program may treat fast input as a paste
        os.write(self._fd, b"\r")

    def read(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (rest := end - time.monotonic()) > 0:
            if select.select([self._fd], [], [], rest)[0]:
                try:
                    self._stream.feed(os.read(self._fd, 65536))
                except OSError:  # the program has ended
                    return

    def read_until(self, is_there: Callable[[str], bool], timeout_s: float = 300.0) -> None:
        """Read until `is_there(screen)` is true. Raises TimeoutError with the screen."""
        end = time.monotonic() + timeout_s
        while not is_there("\n".join(self.lines)):
            if time.monotonic() > end:
                raise TimeoutError("\n".join(self.lines))
            self.read(0.5)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *error: object) -> None:
        os.kill(self._pid, signal.SIGHUP)
        os.waitpid(self._pid, 0)
        os.close(self._fd)

    def text(self) -> Text:
        """Return the screen with its colours, down to the last line of text."""
        n_lines = max((y + 1 for y, line in enumerate(self.lines) if line), default=0)
        return Text("\n").join(self._line(y) for y in range(n_lines))

    def _line(self, y: int) -> Text:
        line = Text()
        for x in range(self._screen.columns):
            char = self._screen.buffer[y][x]
            kinds = ("bold", "reverse", "strikethrough")
            style = [name.replace("through", "") for name in kinds if getattr(char, name)]
            style += [_colour(char.fg)] + ([f"on {_colour(char.bg)}"] if _colour(char.bg) else [])
            line.append(char.data, " ".join(filter(None, style)))
        line.rstrip()
        return line


def _colour(name: str) -> str:
    """Return rich's name for a colour of pyte."""
    if re.fullmatch(r"[0-9a-f]{6}", name):
        return f"#{name}"
    return _COLOURS.get(name, name.replace("bright", "bright_"))


def picture(terminals: Mapping[str, Text], columns: int = 112) -> str:
    """Return an SVG of titled terminals, in fonts of the reader's machine."""
    drawn, top, width = [], 0.0, 0.0
    for n, (title, text) in enumerate(terminals.items()):
        console = Console(record=True, width=columns, file=io.StringIO(), highlight=False)
        console.print(text)
        svg = _FONT_FACE.sub("", console.export_svg(title=title, unique_id=f"terminal-{n}"))
        size = _SIZE.search(svg)
        assert size is not None
        width, height = max(width, float(size[1])), float(size[2])
        drawn.append(svg.replace("<svg ", f'<svg y="{top}" height="{height}" ', 1))
        top += height + _GAP
    whole = "\n".join(drawn).replace("Fira Code", "Menlo, Consolas, DejaVu Sans Mono")
    begin = f'<svg viewBox="0 0 {width} {top - _GAP}" xmlns="http://www.w3.org/2000/svg">'
    return "\n".join(line.rstrip() for line in [begin, *whole.splitlines(), "</svg>", ""])
