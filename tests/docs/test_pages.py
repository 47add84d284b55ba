"""The pages agree with the code, their links are valid, and the site builds."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import ttft
from benchmarks.report import DeviceResults, shown_number
from benchmarks.runs import tokens
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


def test_every_generated_part_is_in_a_page() -> None:
    assert {name for page in PAGES for name in parts(text_of(page))} == set(PARTS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_generated_parts_are_current(page: Path) -> None:
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
def docs_copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    shutil.copytree(DOCS, folder / "docs")
    for name in ("mkdocs.yml", "tools/docs/unbroken.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / name, folder / name)
    return folder


def test_the_site_builds_without_a_warning(docs_copy: Path) -> None:
    done = build(docs_copy)
    assert done.returncode == 0, done.stdout + done.stderr
    page = text_of(docs_copy / "site" / "configuration" / "index.html")
    assert "<code><span>--kvpersist-dir</span> <span>FOLDER</span></code>" in page
    assert 'href="../site.css"' in page
    assert "<span>FILE|plain</span>" in page  # a backslash only for GitHub


def test_broken_links_and_unlisted_pages_fail_the_build(docs_copy: Path) -> None:
    """A wrong anchor, a missing page, and a page that is not in the menu."""
    wrong = "[one](index.md#nowhere) [two](nowhere.md)"
    (docs_copy / "docs" / "new.md").write_text(wrong, encoding="utf-8")
    done = build(docs_copy)
    assert done.returncode == 1
    for problem in ("#nowhere", "nowhere.md", 'not included in the "nav"'):
        assert problem in done.stderr, done.stderr


def anchors(markdown: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", markdown, re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings)
    return {heading.strip().replace(" ", "-") for heading in plain}


def test_links_to_the_repository_have_existing_targets() -> None:
    n_links = 0
    for page in ALL_PAGES:
        for path in re.findall(rf"{PROJECT}/(?:blob|tree)/main/([^\s)]+)", text_of(page)):
            name, _, anchor = path.partition("#")
            assert (REPOSITORY / name).exists(), f"{page.name}: {path}"
            assert not anchor or anchor in anchors(text_of(REPOSITORY / name)), path
            n_links += 1
    assert n_links > 15


def test_the_readme_has_only_absolute_links() -> None:
    """PyPI shows the README, and relative links do not work there."""
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


def test_figures_on_the_pages_match_the_saved_results() -> None:
    """The table that users see first has the medians of the longest prompt."""
    saved = results.shown_results()
    size = results.longest(saved)
    stock, ours = results.first_token_s(saved, "new prompt", size)
    assert stock is not None and ours is not None and stock != ours
    shown = [f"{shown_number(stock)} s", f"{shown_number(ours)} s"]
    better = shown.index(f"{shown_number(min(stock, ours))} s")
    shown[better] = f"**{shown[better]}**"
    row = f"| the first token of a new prompt | {shown[0]} | {shown[1]} |"
    assert row in README and row in text_of(DOCS / "index.md")
    rows = text_of(DOCS / "benchmarks.md").splitlines()
    row = next(row for row in rows if row.startswith(f"| {size:,} | "))
    assert f" | {shown_number(stock)}\u00a0/\u00a0{shown_number(ours)} | " in row
    assert all(f"`{commit}`" in README for commit in saved.commits)


@pytest.mark.parametrize(
    ("repeats", "shown"),
    [
        ({8192: 6, 32768: 3, 65536: 1}, 32768),
        ({1024: 1, 4096: 1, 8192: 1}, 8192),
        ({1024: 2, 4096: 1}, 1024),
    ],
)
def test_the_first_table_shows_the_longest_prompt_that_was_measured_often(
    repeats: dict[int, int], shown: int
) -> None:
    samples = [
        {
            "question": ttft.QUESTION,
            "what": f"new prompt, {tokens(n_tokens)}",
            "side": side,
            "values": [1.0] * n_repeats,
        }
        for n_tokens, n_repeats in repeats.items()
        for side in ("stock", "ours")
    ]
    assert results.longest(DeviceResults("", [{"samples": samples}])) == shown


def test_benchmark_tables_have_their_columns_and_rows_in_order() -> None:
    page = text_of(DOCS / "benchmarks.md")
    assert "| tokens | a new prompt | the next turn | the same prompt again | the next" in page
    numbers = re.findall(r"^\| (\d+) after (\d+)K ", page, re.MULTILINE)
    n_replies = [(int(size), int(n)) for n, size in numbers]
    assert len(n_replies) > 2 and n_replies == sorted(n_replies)


def test_every_option_is_in_a_group_and_in_the_table() -> None:
    table = options.server_options()
    names = [name for group in config.GROUPS.values() for name in group]
    assert len(names) >= 14 and set(names) >= set(config.RARE)
    assert "--" not in re.sub(r"`[^`]*`|\| --- [| -]*\n", "", table), "an option is not code"
    assert [name for name in names if f"| `--kvpersist-{name}" not in table] == []
    rows = [row for row in table.splitlines() if row.startswith("| ")]
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {4}  # GitHub's columns


def test_every_http_path_is_in_a_page() -> None:
    modules = (admin, agents, messages, responses)
    paths = {
        value
        for module in modules
        for name, value in vars(module).items()
        if name.endswith("_PATH") and isinstance(value, str)
    }
    text = "".join(text_of(page) for page in DOCS.glob("*.md"))
    assert len(paths) >= 12 and [path for path in paths if f"{path}`" not in text] == []


def test_fields_and_words_of_the_headers_are_in_the_pages() -> None:
    text = text_of(DOCS / "reuse.md")
    fields = re.findall(r"(\w+)=", Outcome(Kind.MISS, 1, reason=next(iter(Reason))).header)
    assert len(fields) == 6 and [name for name in fields if f"`{name}`" not in text] == []
    words = [kind.value for kind in Kind] + ["ram", "disk", "cold"]
    assert [word for word in (*words, *(r.word for r in Reason)) if f"`{word}`" not in text] == []
    headers = (session_keys.KEEP_HEADER, "X-KVPersist-Namespace", "X-Session-ID")
    page = text_of(DOCS / "configuration.md")
    assert [name for name in headers if f"| `{name}" not in page] == []


def test_every_environment_variable_is_in_the_configuration_page() -> None:
    names = set()
    for source in (REPOSITORY / "mlx_lm_kvpersist").rglob("*.py"):
        names |= set(re.findall(r'"(KVPERSIST_[A-Z_]+)"', text_of(source)))
    page = text_of(DOCS / "configuration.md")
    assert names and [name for name in names if f"| `{name}` |" not in page] == []


def test_pages_have_no_html_tags_outside_code() -> None:
    """`x-<vendor>-session-id` outside of code would be shown as `x--session-id`."""
    for page in ALL_PAGES:
        outside = re.sub(r"```.*?```|`[^`]*`|<!--.*?-->", "", text_of(page), flags=re.DOTALL)
        assert re.findall(r"<[a-z/][^>]*>", outside) == [], page.name


def test_tokens_on_a_mac_are_computed_from_the_budget() -> None:
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
