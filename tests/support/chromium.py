"""A Chromium for the tests of the page: an installed one, or one from the npm registry.

On Linux x86_64, `python -m tests.support.chromium` fetches Chromium without root if none is
installed: the package @sparticuz/chromium (66 MB, with libraries). It is put into
$KVPERSIST_CHROMIUM, or a folder in the user's cache.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import platformdirs

PACKAGE = "@sparticuz/chromium@147"
HOW = "apt-get install chromium, or python -m tests.support.chromium"
_INSTALLED = ("chromium", "chromium-browser", "google-chrome")
_ON_A_MAC = Path("/Applications/Google Chrome.app/Contents/MacOS/Google Chrome")
_UNPACK = 'import c from "@sparticuz/chromium"; console.log(await c.executablePath());'
_WITH_LIBRARIES = {"AWS_EXECUTION_ENV": "AWS_Lambda_nodejs22.x"}
"""The package unpacks its libraries only if it seems to run on AWS Lambda."""


@dataclass(frozen=True)
class Chromium:
    """`env`: variables that the program needs besides the usual ones."""

    path: str
    env: dict[str, str] = field(default_factory=dict)


def cache_folder() -> Path:
    named = os.environ.get("KVPERSIST_CHROMIUM")
    return Path(named) if named else platformdirs.user_cache_path("mlx-lm-kvpersist-chromium")


def find() -> Chromium | None:
    for name in (*_INSTALLED, str(_ON_A_MAC)):
        if path := shutil.which(name):
            return Chromium(path)
    fetched = cache_folder() / "chromium"
    libraries = {"LD_LIBRARY_PATH": str(cache_folder() / "al2023" / "lib")}
    return Chromium(str(fetched), libraries) if fetched.exists() else None


def can_be_fetched() -> bool:
    """Tell whether the npm registry has a Chromium for this machine."""
    is_linux = (sys.platform, platform.machine()) == ("linux", "x86_64")
    return is_linux and shutil.which("npm") is not None


def fetch() -> None:
    """Raises OSError or subprocess.CalledProcessError."""
    target = cache_folder()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as work:
        quiet = ("--silent", "--no-fund", "--no-audit")
        install = ("npm", "install", *quiet, "--prefix", work, PACKAGE)
        subprocess.run(install, check=True, capture_output=True, timeout=600)
        script, unpacked = Path(work) / "unpack.mjs", Path(work) / "unpacked"
        script.write_text(_UNPACK, encoding="utf-8")
        unpacked.mkdir()
        env = {**os.environ, **_WITH_LIBRARIES, "TMPDIR": str(unpacked)}
        subprocess.run(["node", script], check=True, capture_output=True, timeout=300, env=env)
        shutil.rmtree(target, ignore_errors=True)
        unpacked.rename(target)


def main() -> int:
    """Fetch Chromium if it is missing and can be fetched; otherwise say why the tests skip."""
    if find() is not None:
        return 0
    if not can_be_fetched():
        print("no Chromium, and none can be fetched: the tests of the page are skipped")
        return 0
    try:
        fetch()
    except (OSError, subprocess.SubprocessError) as error:
        print(f"Chromium cannot be fetched, so the tests of the page are skipped: {error}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
