"""The pages agree with the code, their links lead somewhere, and they become a site."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.report import shown_number
from mlx_lm_kvpersist import config
from mlx_lm_kvpersist.api import admin, agents, messages, responses, session_keys
from mlx_lm_kvpersist.request.outcome import Kind, Outcome, Reason
from tests.support.host import REPOSITORY
from tools.docs import disk, options, results
from tools.docs.pages import PAGES, PARTS, parts, remade

from .blocks import PAGES as ALL_PAGES
from .blocks import text_of

DOCS = REPOSITORY / "docs"
README = text_of(REPOSITORY / "README.md")
PROJECT = "https://github.com/mlx-lm-kvpersist/mlx-lm-kvpersist"
REMAKE = "run: python -m tools.docs"


def test_every_part_is_in_a_page() -> None:
    assert {name for each in PAGES for name in parts(text_of(each))} == set(PARTS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_what_is_made_from_the_code_is_current(page: Path) -> None:
    assert remade(text_of(page)) == text_of(page), REMAKE


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    """Build the site of a folder with docs/. With --quiet, mkdocs would not count warnings."""
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", "site"],
        cwd=folder,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    shutil.copytree(DOCS, folder / "docs")
    for name in ("mkdocs.yml", "tools/docs/unbroken.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, folder / name)
    return folder


def test_the_site_builds_without_a_warning(copied: Path) -> None:
    done = build(copied)
    assert done.returncode == 0, done.stdout + done.stderr
    page = text_of(copied / "site" / "configuration" / "index.html")
    assert "<code><span>--kvpersist-dir</span> <span>FOLDER</span></code>" in page
    assert 'href="../site.css"' in page


def test_links_that_lead_nowhere_are_seen(copied: Path) -> None:
    """Links to an anchor and to a page; and a page that is in no menu."""
    wrong = "[one](index.md#nowhere) [two](nowhere.md)"
    (copied / "docs" / "new.md").write_text(wrong, encoding="utf-8")
    done = build(copied)
    assert done.returncode == 1
    for what in ("#nowhere", "nowhere.md", 'not included in the "nav"'):
        assert what in done.stderr, done.stderr


def anchors(markdown: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", markdown, re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.strip().replace(" ", "-") for heading in plain}


def test_links_to_the_project_lead_to_its_files() -> None:
    n_links = 0
    for each in ALL_PAGES:
        for path in re.findall(rf"{PROJECT}/(?:blob|tree)/main/([^\s)]+)", text_of(each)):
            name, _, anchor = path.partition("#")
            assert (REPOSITORY / name).exists(), f"{each.name}: {path}"
            assert not anchor or anchor in anchors(text_of(REPOSITORY / name)), path
            n_links += 1
    assert n_links > 15


def test_the_readme_links_to_absolute_addresses_only() -> None:
    """PyPI shows it, and relative links lead nowhere there."""
    targets = re.findall(r"\]\(([^)]+)\)", README) + re.findall(r"^\[.*\]: (.*)$", README, re.M)
    assert len(targets) > 10
    assert [target for target in targets if not target.startswith("https://")] == []
    labels = set(re.findall(r"^\[(.*)\]: ", README, re.MULTILINE))
    used = set(re.findall(r"(?<!\!)\[([^\]\n]+)\](?![(:\]])", README))
    assert {name for name in used if name not in ("cpu",)} <= labels | {
        text for text, _ in re.findall(r"\[([^\]]+)\]\[([^\]]+)\]", README)
    }
    picture = re.search(r"raw\.githubusercontent\.com/[\w-]+/[\w-]+/main/(\S+)", README)
    assert picture and (REPOSITORY / picture[1]).exists()


def test_figures_are_those_of_the_kept_results() -> None:
    """The table that users see first has the medians of the longest prompt."""
    kept = results.shown_results()
    size = results.longest(kept)
    stock, ours = results.first_token_s(kept, "new prompt", size)
    assert stock is not None and ours is not None and stock != ours
    shown = [f"{shown_number(stock)} s", f"{shown_number(ours)} s"]
    better = shown.index(f"{shown_number(min(stock, ours))} s")
    shown[better] = f"**{shown[better]}**"
    row = f"| the first token of a new prompt | {shown[0]} | {shown[1]} |"
    assert row in README and row in text_of(DOCS / "index.md")
    rows = text_of(DOCS / "benchmarks.md").splitlines()
    row = next(row for row in rows if row.startswith(f"| {size:,} | "))
    assert f" | {shown_number(stock)}\u00a0/\u00a0{shown_number(ours)} | " in row
    assert all(f"`{commit}`" in README for commit in kept.commits)


def test_tables_of_figures_have_the_order_in_which_a_user_meets_the_rows() -> None:
    page = text_of(DOCS / "benchmarks.md")
    assert "| tokens | a new prompt | the next turn | the same prompt again | the next" in page
    numbers = re.findall(r"^\| (\d+) after (\d+)K ", page, re.MULTILINE)
    n_replies = [(int(size), int(n)) for n, size in numbers]
    assert len(n_replies) > 2 and n_replies == sorted(n_replies)


def test_every_option_has_a_group() -> None:
    table = options.server_options()
    names = [name for group in config.GROUPS.values() for name in group]
    assert len(names) >= 14 and set(names) >= set(config.RARE)
    assert "--" not in re.sub(r"`[^`]*`|\| --- [| -]*\n", "", table), "an option is not code"
    assert [name for name in names if f"| `--kvpersist-{name}" not in table] == []


def test_every_path_of_a_module_stands_in_a_page() -> None:
    modules = (admin, agents, messages, responses)
    paths = {
        value
        for module in modules
        for name, value in vars(module).items()
        if name.endswith("_PATH") and isinstance(value, str)
    }
    text = "".join(text_of(each) for each in DOCS.glob("*.md"))
    assert len(paths) >= 12 and [path for path in paths if f"{path}`" not in text] == []


def test_every_field_of_the_header_stands_there() -> None:
    text = text_of(DOCS / "reuse.md")
    fields = re.findall(r"(\w+)=", Outcome(Kind.MISS, 1, reason=next(iter(Reason))).header)
    assert len(fields) == 6 and [name for name in fields if f"`{name}`" not in text] == []
    words = [kind.value for kind in Kind] + ["ram", "disk", "cold"]
    assert [word for word in (*words, *(r.word for r in Reason)) if f"`{word}`" not in text] == []
    headers = (session_keys.KEEP_HEADER, "X-KVPersist-Namespace", "X-Session-ID")
    page = text_of(DOCS / "configuration.md")
    assert [name for name in headers if f"| `{name}" not in page] == []


def test_every_variable_stands_there() -> None:
    names = set()
    for source in (REPOSITORY / "mlx_lm_kvpersist").rglob("*.py"):
        names |= set(re.findall(r'"(KVPERSIST_[A-Z_]+)"', text_of(source)))
    page = text_of(DOCS / "configuration.md")
    assert names and [name for name in names if f"| `{name}` |" not in page] == []


def test_nothing_is_taken_for_html() -> None:
    """`x-<vendor>-session-id` outside of code would be shown as `x--session-id`."""
    for each in ALL_PAGES:
        outside = re.sub(r"```.*?```|`[^`]*`|<!--.*?-->", "", text_of(each), flags=re.DOTALL)
        assert re.findall(r"<[a-z/][^>]*>", outside) == [], each.name


def test_tokens_on_a_mac_follow_from_the_budget() -> None:
    """Computed by hand for Llama 3.1 8B: 8 heads of 128 in 32 layers, 6.5 bits a number."""
    gib = 1 << 30
    offered, weights = 16 * gib * 2 // 3, 8.03e9 * 4.5 / 8
    token = 2 * 32 * 8 * 128 * 6.5 / 8
    expected = (offered - weights - offered / 8) / token
    assert abs((disk.tokens_on_a_mac("Llama 3.1 8B", 16) or 0) / expected - 1) < 0.001
    # 128 GiB: the reserve ends at 4 GiB.
    expected = (96 * gib - weights - 4 * gib) / token
    assert abs((disk.tokens_on_a_mac("Llama 3.1 8B", 128) or 0) / expected - 1) < 0.001
    assert disk.tokens_on_a_mac("Llama 3.3 70B", 32) is None
