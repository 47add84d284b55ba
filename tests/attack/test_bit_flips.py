"""After a bit of any store file flips, every answer is still correct."""

from __future__ import annotations

import copy
import random
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from mlx_lm_kvpersist.host.hooks import Prompt
from mlx_lm_kvpersist.request.lookup import Lookup
from mlx_lm_kvpersist.request.model import LoadedModel
from mlx_lm_kvpersist.request.replies import retokenize
from mlx_lm_kvpersist.store.block_store import BlockStore
from tests.support import Message, synthetic_text

from .driving import LIMITS, Answer, Cold, compute_rest, forward, talk_with

SYSTEM: Message = {"role": "system", "content": synthetic_text(400, seed=5)}
Change = Callable[[Path, random.Random], str]


@dataclass
class Prepared:
    """A store left by kill -9, and follow-up prompts for its conversations."""

    folder: Path
    loaded: LoadedModel
    prompts: list[list[Message]]
    texts: list[set[str]]
    """The allowed texts of each prompt: with its reply as generated, or as sent back."""


def render(loaded: LoadedModel, messages: list[Message]) -> list[int]:
    ids: list[int] = loaded.tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    return ids


def ask(loaded: LoadedModel, store: BlockStore, messages: list[Message]) -> Answer:
    """Answer a chat as the plugin does, but let every exception through."""
    messages, root = copy.deepcopy(messages), loaded.root
    ids = render(loaded, messages)
    prompt = retokenize(Prompt(ids, [ids], ["user"], messages), root, store, loaded)
    return compute_rest(loaded, Lookup(prompt, root, store, loaded).restore())


@pytest.fixture(scope="module")
def prepared(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """Three conversations; the last conversation is only in the index's write-ahead log."""
    work, folder = (tmp_path_factory.mktemp(name) for name in ("work", "prepared"))
    prompts, texts = [], []
    for n in range(3):
        with talk_with(loaded, work) as talk:
            question: Message = {"role": "user", "content": f"{n} {synthetic_text(90, seed=n)}"}
            messages = [SYSTEM, question]
            answer = ask(loaded, talk.store, messages)
            # The client receives a reply without its leading space.
            reply = f" so {n} " + synthetic_text(30, seed=50 + n)
            ids = [*answer.ids, *loaded.encode(reply)]
            forward(loaded, ids[len(answer.ids) :], answer.caches)
            talk.keep(ids, answer.caches, len(answer.ids), f"session-{n}", messages)
            talk.store.drain()
            for sent in (reply.lstrip(), reply):
                assistant: Message = {"role": "assistant", "content": sent}
                follow_up: Message = {"role": "user", "content": "And?"}
                prompts.append([SYSTEM, question, assistant, follow_up])
                texts.append(renderings(loaded, prompts[-1], reply))
            if n == 2:
                assert (work / "index.sqlite-wal").stat().st_size > 4096
                shutil.copytree(work, folder, dirs_exist_ok=True)
    return Prepared(folder, loaded, prompts, texts)


def renderings(loaded: LoadedModel, messages: list[Message], reply: str) -> set[str]:
    assert loaded.text is not None
    texts = set()
    for content in (reply, messages[2]["content"]):
        variant = [*messages[:2], {**messages[2], "content": content}, *messages[3:]]
        texts.add(loaded.text.decode(render(loaded, variant)))
    return texts


def flip_a_bit(path: Path, rng: random.Random, byte: int | None = None) -> str:
    """Flip a bit of a file; half of the time in its first 2 KB, where headers are."""
    content = bytearray(path.read_bytes())
    if byte is None:
        byte = rng.randrange(min(len(content), 2048) if rng.random() < 0.5 else len(content))
    bit = rng.randrange(8)
    content[byte] ^= 1 << bit
    path.write_bytes(content)
    return f"bit {bit} of byte {byte} of {path.name} ({len(content)} bytes)"


def files_of(folder: Path) -> list[Path]:
    """Return the files that have content, in a fixed order."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    return sorted(paths)


def attack(prepared: Prepared, cold: Cold, folder: Path, change: Change, seed: int) -> None:
    """Change a copy of the store, open it, ask, and compare."""
    rng = random.Random(seed)
    shutil.copytree(prepared.folder, folder)
    if rng.random() < 0.2:
        # The index is rebuilt from the files.
        for path in folder.glob("index.sqlite*"):
            path.unlink()
    label = f"seed {seed}: {change(folder, rng)}"
    assert prepared.loaded.text is not None
    try:
        store = BlockStore(folder, LIMITS)
        try:
            for n in rng.sample(range(len(prepared.prompts)), 2):
                answer = ask(prepared.loaded, store, prepared.prompts[n])
                prompt_text = prepared.loaded.text.decode(answer.ids)
                if prompt_text not in prepared.texts[n]:
                    raise ValueError(f"the model is told something else: ...{prompt_text[-200:]}")
                cold.check(answer)
        finally:
            store.close()
    except Exception as error:
        raise AssertionError(label) from error
    shutil.rmtree(folder)


def flip_in_any_file(folder: Path, rng: random.Random) -> str:
    return flip_a_bit(rng.choice(files_of(folder)), rng)


def attack_often(prepared: Prepared, cold: Cold, folder: Path, change: Change, n: int) -> None:
    """Attack `n` times and report all failures at once."""
    failures = []
    for seed in range(n):
        try:
            attack(prepared, cold, folder / str(seed), change, seed)
        except AssertionError as error:
            failures.append(f"{error} <- {error.__cause__!r}")
    assert not failures, f"{len(failures)} of {n}:\n" + "\n".join(failures[:20])


def few_or_many(few: int, many: int) -> pytest.MarkDecorator:
    """Run a test with a small `n`, and with a large `n` among the slow tests."""
    slow = pytest.param(many, marks=(pytest.mark.slow, pytest.mark.timeout(1200)))
    return pytest.mark.parametrize("n", [few, slow])


def test_undamaged_prepared_store_is_restored(
    prepared: Prepared, cold: Cold, tmp_path: Path
) -> None:
    """The damaged copies in other tests therefore come from a usable store."""
    shutil.copytree(prepared.folder, tmp_path / "copy")
    with talk_with(prepared.loaded, tmp_path / "copy") as talk:
        for messages in prepared.prompts[::2]:
            answer = ask(prepared.loaded, talk.store, messages)
            assert answer.outcome.n_restored > 0 and answer.outcome.kind.value == "EXTEND"
            cold.check(answer)
            talk.forget_hot_blocks()


@few_or_many(20, 2000)
def test_flipped_bits_in_store_files_do_not_change_answers(
    prepared: Prepared, cold: Cold, tmp_path: Path, n: int
) -> None:
    attack_often(prepared, cold, tmp_path, flip_in_any_file, n)


def flip_in_index_header(folder: Path, rng: random.Random) -> str:
    """Flip a bit of the database header, the first 100 bytes; often remove the log first."""
    for name in ("index.sqlite-wal", "index.sqlite-shm"):
        if rng.random() < 0.7:
            (folder / name).unlink(missing_ok=True)
    path = folder / "index.sqlite"
    return flip_a_bit(path, rng, rng.randrange(100)) if path.exists() else "no index"


@few_or_many(15, 1500)
def test_flipped_bits_in_the_index_header_do_not_change_answers(
    prepared: Prepared, cold: Cold, tmp_path: Path, n: int
) -> None:
    attack_often(prepared, cold, tmp_path, flip_in_index_header, n)


def truncate(folder: Path, rng: random.Random) -> str:
    """Cut a file off anywhere, as a power loss may."""
    path = rng.choice(files_of(folder))
    size = rng.randrange(path.stat().st_size)
    with path.open("r+b") as file:
        file.truncate(size)
    return f"{path.name} truncated to {size} bytes"


def zero_a_page(folder: Path, rng: random.Random) -> str:
    """Zero 4 KiB, as if they never reached the device."""
    path = rng.choice(files_of(folder))
    n_pages = -(-path.stat().st_size // 4096)
    page = rng.randrange(n_pages)
    content = bytearray(path.read_bytes())
    end = min(len(content), 4096 * (page + 1))
    content[4096 * page : end] = bytes(end - 4096 * page)
    path.write_bytes(content)
    return f"page {page} of {n_pages} of {path.name} zeroed"


def swap(folder: Path, rng: random.Random) -> str:
    """Swap two files."""
    first, second = rng.sample(files_of(folder), 2)
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    return f"{first.name} and {second.name} swapped"


def garbage(folder: Path, rng: random.Random) -> str:
    """Overwrite a stretch of a file with random bytes."""
    path = rng.choice(files_of(folder))
    content = bytearray(path.read_bytes())
    start = rng.randrange(len(content))
    n_bytes = min(rng.randrange(1, 600), len(content) - start)
    content[start : start + n_bytes] = rng.randbytes(n_bytes)
    path.write_bytes(content)
    return f"{n_bytes} bytes from {start} of {path.name} overwritten"


TORN: list[Change] = [truncate, zero_a_page, swap, garbage]


@few_or_many(8, 700)
@pytest.mark.parametrize("change", TORN, ids=lambda change: change.__name__)
def test_torn_files_do_not_change_answers(
    prepared: Prepared, cold: Cold, tmp_path: Path, change: Change, n: int
) -> None:
    attack_often(prepared, cold, tmp_path, change, n)


def recovery_failure(
    prepared: Prepared, cold: Cold, folder: Path, change: Callable[[Path], str]
) -> str:
    """Damage an index, start twice; return "", or why a new turn is not stored and reused."""
    shutil.copytree(prepared.folder, folder)
    for name in ("index.sqlite-wal", "index.sqlite-shm"):
        (folder / name).unlink(missing_ok=True)
    label = change(folder / "index.sqlite")
    for _ in range(2):
        with talk_with(prepared.loaded, folder) as talk:
            answer = ask(prepared.loaded, talk.store, prepared.prompts[0])
            cold.check(answer, label)
            ids = talk.go_on(answer, 4, "after")
            talk.forget_hot_blocks()
            outcome = talk.ask([*ids, 5]).outcome
    shutil.rmtree(folder)
    return "" if outcome.n_restored >= len(ids) - 4 else f"{label}: {outcome}"


def test_store_recovers_after_damage_to_any_index_page(
    prepared: Prepared, cold: Cold, tmp_path: Path
) -> None:
    """After a restart, new turns are stored and reused."""
    n_pages = (prepared.folder / "index.sqlite").stat().st_size // 4096

    def overwrite(page: int, path: Path) -> str:
        content = bytearray(path.read_bytes())
        content[4096 * page : 4096 * (page + 1)] = random.Random(page).randbytes(4096)
        path.write_bytes(content)
        return f"page {page}"

    failures = [
        recovery_failure(prepared, cold, tmp_path / str(page), partial(overwrite, page))
        for page in range(n_pages)
    ]
    assert not any(failures), "\n".join(failures)


@few_or_many(16, 1000)
def test_store_recovers_after_a_flipped_bit_in_the_index(
    prepared: Prepared, cold: Cold, tmp_path: Path, n: int
) -> None:
    """Half of the flipped bits are in the first page: the header and the schema."""
    failures: list[str] = []
    for seed in range(n):
        rng = random.Random(seed)
        byte = rng.randrange(4096) if seed % 2 else None

        def flip(path: Path, rng: random.Random = rng, byte: int | None = byte) -> str:
            return flip_a_bit(path, rng, byte)

        try:
            failures.append(recovery_failure(prepared, cold, tmp_path / str(seed), flip))
        except Exception as error:
            failures.append(f"seed {seed}: {error!r}")
    failures = [failure for failure in failures if failure]
    assert not failures, f"{len(failures)} of {n}:\n" + "\n".join(failures[:20])


def test_flipped_bits_in_remembered_replies_do_not_change_answers(
    prepared: Prepared, cold: Cold, tmp_path: Path
) -> None:
    """Their ids become input of the model, and no key or block file can show an error in them."""

    def flip_in_reply(folder: Path, rng: random.Random) -> str:
        if not (folder / "index.sqlite").exists():
            return "no index"
        db = sqlite3.connect(folder / "index.sqlite")
        with closing(db), db:
            rows = db.execute("SELECT digest, ids FROM replies").fetchall()
            for digest, ids in rows:
                flipped = bytearray(ids)
                flipped[4 * rng.randrange(len(ids) // 4)] ^= 1 << rng.randrange(8)
                db.execute("UPDATE replies SET ids = ? WHERE digest = ?", (bytes(flipped), digest))
        return f"a bit of each of {len(rows)} replies"

    attack_often(prepared, cold, tmp_path, flip_in_reply, 10)
