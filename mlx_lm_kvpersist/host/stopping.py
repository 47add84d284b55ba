"""How an error ends the server: with one line on stderr.

`_startup` imports this module in every Python process that is started with `--plugin`, so
at the top it imports only the standard library.
"""

from __future__ import annotations

import itertools
import sys
import traceback
from collections.abc import Iterable, Sequence
from typing import NoReturn


def requested_plugins(argv: Sequence[str]) -> list[str]:
    """Return the names given with `--plugin`, in order, each once.

    Plugins add options, so their names are read before argparse runs. If a name is missing,
    argparse reports the error.
    """
    names: list[str] = []
    for arg, following in zip(argv, [*argv[1:], "-"], strict=False):
        if arg.startswith("--plugin="):
            names.append(arg.removeprefix("--plugin="))
        elif arg == "--plugin" and not following.startswith("-"):
            names.append(following)
    return list(dict.fromkeys(names))


def with_nearest(message: str, options: Iterable[str]) -> str:
    """Add the most similar option to argparse's message about an unknown option."""
    unknown = [word.partition("=")[0] for word in message.split() if word.startswith("--")]
    if unknown and message.startswith("unrecognized arguments"):
        from difflib import get_close_matches  # imported late, because few starts need it

        near = get_close_matches(unknown[0], list(options), 1)
        message += f"; did you mean {near[0]}?" if near else ""
    return message


def stop(error: BaseException) -> NoReturn:
    report(error)
    raise SystemExit(1) from error


def report(error: BaseException) -> None:
    """Print an error as one line on stderr; with `--log-level DEBUG`, a traceback before it."""
    from ..errors import KVPersistError, PatchError

    # Options may not be parsed yet.
    pairs = itertools.pairwise(sys.argv)
    if "--log-level=DEBUG" in sys.argv or ("--log-level", "DEBUG") in pairs:
        traceback.print_exception(error)
    message = " ".join(str(error).split())
    if isinstance(error, PatchError):
        from .patching.versions import found_and_known

        message = f"{message} ({found_and_known()})"
    if not isinstance(error, KVPersistError):
        reason = f"stopped by an unexpected {type(error).__name__}: {message}"
        message = f"{reason} (--log-level DEBUG shows the traceback)"
    options = "".join(f" --plugin {name}" for name in requested_plugins(sys.argv[1:]))
    print(f"mlx_lm.server{options}: {message}", file=sys.stderr, flush=True)
