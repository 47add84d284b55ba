"""Restored caches and recomputed caches give the same logits."""

from __future__ import annotations

import random
import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlx_lm_kvpersist import block as block_module
from mlx_lm_kvpersist.block import Block, block_key
from mlx_lm_kvpersist.cache.blocks import _Buffers
from mlx_lm_kvpersist.cache.geometry.spec import probe_model
from mlx_lm_kvpersist.host.hooks import REPLY, Prompt
from mlx_lm_kvpersist.match import TokenText
from mlx_lm_kvpersist.request import lookup
from mlx_lm_kvpersist.request import model as model_module
from mlx_lm_kvpersist.request import saver as saver_module
from mlx_lm_kvpersist.request.lookup import Lookup
from mlx_lm_kvpersist.request.model import LoadedModel, Speed
from mlx_lm_kvpersist.request.outcome import Kind, Reason
from mlx_lm_kvpersist.request.saver import RunningSequence
from mlx_lm_kvpersist.round_trip import tiny_model as selftest_model
from mlx_lm_kvpersist.store.block_store import BlockStore, StoreLimits
from mlx_lm_kvpersist.store.records import DISK, RAM
from tests.support.store_files import block_path, read_record
from tests.support.synthetic import synthetic_text

from .conftest import Conversations

TOLERANCE = 2e-3
"""For logits of size 10, float32, 2 layers: another order of summation changes quantized KV."""


def sampled_turn(loaded: LoadedModel, n_tokens: int, seed: int = 0) -> list[int]:
    """Return the ids of text, then random ids as from sampling, some of them half characters."""
    text = "Grüße 🎉 " + synthetic_text(n_tokens // 2)
    canonical = list(loaded.tokenizer.encode(text))[: n_tokens // 2]
    rng = random.Random(seed)
    return canonical + [rng.randrange(300, 590) for _ in range(n_tokens - len(canonical))]


def assert_same_logits(talk: Conversations, ids: list[int], caches: list[Any], n: int) -> None:
    restored = talk.forward(ids[n:], caches)
    recomputed = talk.forward(ids, talk.loaded.spec.make_cache())
    difference = float(mx.abs(restored - recomputed).max())
    assert difference < TOLERANCE, f"logits differ by {difference} after {n} of {len(ids)} tokens"


def respelled(loaded: LoadedModel, ids: list[int], at: int) -> list[int]:
    """Return other ids for the same text: split the first possible token from `at` on."""
    assert loaded.text is not None
    for i in range(at, len(ids)):
        letters = loaded.text.decode([ids[i]])
        spelled = [x for c in letters for x in loaded.tokenizer.encode(c)]
        if len(spelled) > 1 and loaded.text.decode(spelled) == letters:
            return [*ids[:i], *spelled, *ids[i + 1 :]]
    raise AssertionError("no token can be spelled in another way")


@pytest.fixture(scope="module")
def stored(loaded: LoadedModel) -> Any:
    """400 tokens of one conversation, on disk."""
    with tempfile.TemporaryDirectory() as folder:
        store = BlockStore(Path(folder), StoreLimits(1 << 30, 1 << 30))
        talk = Conversations(loaded, store)
        ids = sampled_turn(loaded, 400)
        talk.remember(ids, n_prompt=200)
        without_text(talk).remember(ids, n_prompt=200)
        yield talk, ids
        store.close()


def few_or_many(few: int, many: int) -> pytest.MarkDecorator:
    """Try `n` examples: a few by default, many in slow tests."""
    return pytest.mark.parametrize("n", [few, pytest.param(many, marks=pytest.mark.slow)])


def examples(n: int) -> settings:
    return settings(max_examples=n, suppress_health_check=[HealthCheck.too_slow])


@few_or_many(10, 50)
def test_a_prompt_cut_at_any_character_has_recomputed_logits(stored: Any, n: int) -> None:
    """EXACT, EXTEND and DIVERGE, from RAM and from disk, at every character of 400 tokens."""
    talk, ids = stored

    @examples(n)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        text = talk.loaded.text.decode(ids)
        cut = data.draw(st.integers(0, len(text)))
        ends = ["", " and more", "ü🎉", "\n\nNew", "\ufffd"]
        prompt_text = text[:cut] + data.draw(st.sampled_from(ends))
        if data.draw(st.booleans()):
            talk.forget_hot_blocks()
        prompt = list(talk.loaded.tokenizer.encode(prompt_text.removeprefix(bos_of(talk.loaded))))
        if len(prompt) < 2:
            return
        fed, caches, outcome = talk.ask(prompt)
        assert talk.loaded.text.decode(fed) == talk.loaded.text.decode(prompt)
        assert outcome.n_reused < len(fed)
        assert_same_logits(talk, fed, caches, outcome.n_reused)

    check()


def without_text(talk: Conversations) -> Conversations:
    """Return the same model and store, with prompts matched by ids."""
    return replace(talk, loaded=replace(talk.loaded, text=None))


def bos_of(loaded: LoadedModel) -> str:
    return loaded.tokenizer.bos_token or ""


@few_or_many(8, 40)
def test_a_prompt_cut_at_any_token_has_recomputed_logits(stored: Any, n: int) -> None:
    """Prompts are matched by ids, so any token can be the last that matches."""
    talk, ids = stored
    talk = without_text(talk)
    talk.forget_hot_blocks()  # blocks in RAM are in full precision, and reused up to any token

    @examples(n)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        cut = data.draw(st.integers(1, len(ids)))
        other = [(ids[cut] + 1) % 290 if cut < len(ids) else 7, 11]
        prompt = ids[:cut] + data.draw(st.sampled_from([[], other]))
        if len(prompt) < 2:
            return
        fed, caches, outcome = talk.ask(prompt)
        assert fed == prompt
        n_found = min(cut, len(prompt) - 1)
        # A position in a whole block is computed from the block's beginning.
        assert outcome.n_reused == (n_found if n_found >= 256 else 0)
        assert_same_logits(talk, fed, caches, outcome.n_reused)

    check()


def test_an_outcome_has_its_kind_reused_tokens_and_tier(talk: Conversations) -> None:
    ids = sampled_turn(talk.loaded, 300)
    eos = talk.loaded.tokenizer.eos_token_id
    turn = [*ids, eos]
    talk.remember(turn, n_prompt=150)
    assert talk.ask(turn)[2].kind is Kind.EXACT
    assert talk.ask(turn[:290])[2].kind in (Kind.EXACT, Kind.DIVERGE)
    follow_up = [*turn, *talk.loaded.encode("next question")]
    _, _, outcome = talk.ask(follow_up)
    assert (outcome.kind, outcome.n_reused, outcome.tier) == (Kind.EXTEND, 301, "ram")
    edited = [*turn[:280], *talk.loaded.encode("!!! something else entirely")]
    _, _, outcome = talk.ask(edited)
    assert outcome.kind is Kind.DIVERGE and 270 < outcome.n_reused < len(edited)
    unknown = [eos, *talk.loaded.encode("unknown")]
    _, _, outcome = talk.ask(unknown)
    assert (outcome.kind, outcome.n_reused, outcome.tier) == (Kind.MISS, 0, "cold")
    talk.forget_hot_blocks()
    _, _, outcome = talk.ask(follow_up)
    assert (outcome.n_reused, outcome.n_restored, outcome.tier) == (301, 301, "disk")


def test_a_second_turn_adds_only_its_new_blocks(talk: Conversations) -> None:
    ids = sampled_turn(talk.loaded, 600)
    talk.remember(ids[:300], n_prompt=200, session="s")
    talk.remember(ids, n_prompt=500, session="s")
    talk.store.drain()
    # 300 tokens end in a block of 44, which the second turn's block of 256 replaces.
    assert talk.store.index.totals().n_blocks == 3
    assert len([x.leaf for x in talk.store.index.sessions() if x.name == "s"]) == 1
    _, _, outcome = talk.ask([*ids, 5])
    assert outcome.n_reused == 600


def test_a_prompt_without_a_reply_stores_only_full_blocks_on_disk(talk: Conversations) -> None:
    ids = sampled_turn(talk.loaded, 600)
    talk.remember(ids, n_prompt=601)
    assert talk.ask([*ids, 5])[2].n_reused == 600
    talk.forget_hot_blocks()
    assert talk.ask([*ids, 5])[2].n_reused == 512


def test_reuse_ends_at_a_damaged_block_until_it_is_stored_again(talk: Conversations) -> None:
    ids = sampled_turn(talk.loaded, 700)
    talk.remember(ids, n_prompt=300)
    talk.forget_hot_blocks()
    (first,) = talk.store.children(talk.root.key)
    (second,) = talk.store.children(first.key)
    path = block_path(talk.store.folder, second.key)
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    fed, caches, outcome = talk.ask([*ids, 5])
    assert outcome.n_reused == 256
    assert_same_logits(talk, fed, caches, 256)
    # The turn stores the block again.
    talk.remember(ids, n_prompt=300)
    talk.forget_hot_blocks()
    assert talk.ask([*ids, 5])[2].n_reused == 700


def test_another_branch_replaces_a_block_deleted_before_it_is_read(
    talk: Conversations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A turn that is being written may replace the last block of the earlier turn."""
    common = sampled_turn(talk.loaded, 150)
    for seed in (1, 2):
        talk.remember([*common, *sampled_turn(talk.loaded, 40, seed)], n_prompt=160)
    talk.forget_hot_blocks()
    prompt = [*common, *sampled_turn(talk.loaded, 30, seed=3)]
    read = talk.store.reader.load_all
    gone: list[bytes] = []

    def remove_and_read(wanted: Any, root: Any) -> Any:
        if not gone:
            gone.append(wanted[-1].key)
            block_path(talk.store.folder, gone[0]).unlink()
        return read(wanted, root)

    monkeypatch.setattr(talk.store.reader, "load_all", remove_and_read)
    fed, caches, outcome = talk.ask(prompt)
    assert gone and outcome.kind is Kind.DIVERGE and outcome.n_reused >= len(common) - 2
    assert_same_logits(talk, fed, caches, outcome.n_reused)


@pytest.mark.parametrize("loaded", ["byte-level"], indirect=True)
def test_fed_ids_and_caches_are_of_one_branch_while_branches_disappear(
    talk: Conversations, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = synthetic_text(1400, seed=3)
    ids = list(talk.loaded.tokenizer.encode(text))
    for n in range(5):
        # Other ids for the same text each time, so that a mix of two branches would show.
        branch = respelled(talk.loaded, ids, 10 + 20 * n)
        talk.remember(branch[: len(branch) - 10 * n], n_prompt=4)
    talk.forget_hot_blocks()
    read = talk.store.reader.load_all
    gone: list[bytes] = []

    def remove_and_read(wanted: Any, root: Any) -> Any:
        blocks = [record for record in wanted if isinstance(record, Block)]
        if len(blocks) > 1:
            gone.append(blocks[1].key)
            block_path(talk.store.folder, gone[-1]).unlink()
        return read(wanted, root)

    monkeypatch.setattr(talk.store.reader, "load_all", remove_and_read)
    fed, caches, outcome = talk.ask(list(talk.loaded.tokenizer.encode(text + " And so on")))
    assert len(gone) == 5 and outcome.n_reused > 0
    assert_same_logits(talk, fed, caches, outcome.n_reused)


def test_blocks_that_an_aborted_restore_read_still_need_a_canary(tmp_path: Path) -> None:
    """The aborted restore ran no canary, so the next one must, although all blocks are in RAM."""
    model = selftest_model()
    spec = probe_model(model)
    loaded = LoadedModel(model, None, spec, "model", None)
    ids = [i * 7 % 61 + 2 for i in range(900)]
    with closing(BlockStore(tmp_path, StoreLimits(1 << 30, 1 << 30))) as store:
        talk = Conversations(loaded, store)
        caches = spec.make_cache()
        mx.eval(selftest_model(seed=99)(mx.array([ids]), cache=caches))
        sequence = RunningSequence(talk.root, 10)
        loaded.save(sequence, ids, caches, REPLY, store)
        talk.forget_hot_blocks()
        last = max(
            tmp_path.glob("blocks/*/*"), key=lambda x: getattr(read_record(x)[0], "start", 0)
        )
        last.unlink()
        _, _, outcome = talk.ask([*ids, 5, 6, 7])
        assert outcome.kind is Kind.MISS
        assert store.blocks_quarantined == 3


@pytest.mark.parametrize("loaded", ["byte-level"], indirect=True)
def test_a_restore_measures_the_rate_of_its_tier(
    talk: Conversations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_module, "MIN_RESTORE_BYTES", 1)
    ids = sampled_turn(talk.loaded, 300)
    talk.remember(ids, n_prompt=200)
    talk = replace(talk, loaded=replace(talk.loaded, speed=Speed()))
    talk.ask([*ids, 5])
    assert talk.loaded.speed.rates.keys() == {RAM}
    talk.forget_hot_blocks()
    talk.ask([*ids, 5])
    assert talk.loaded.speed.rates.keys() == {RAM, DISK}


@pytest.mark.parametrize("loaded", ["byte-level"], indirect=True)
@pytest.mark.parametrize("damaged", [0, 1])
def test_an_intact_block_replaces_a_damaged_block_with_the_same_tokens(
    talk: Conversations, damaged: int
) -> None:
    """Two blocks have the tokens that the prompt needs; if one is damaged, the other is used."""
    ids = sampled_turn(talk.loaded, 1040)
    for end in ([5, 6, 7], [8, 9, 10]):
        talk.remember([*ids[:1000], *end], n_prompt=900)
    talk.store.drain()
    third = talk.store.children(talk.root.key)[0]
    for _ in range(2):
        third = talk.store.children(third.key)[0]
    siblings = sorted(talk.store.children(third.key), key=lambda node: node.key)
    assert [node.n_tokens for node in siblings] == [235, 235]
    victim = siblings[damaged].key
    talk.store.pool.remove(victim)
    path = block_path(talk.store.folder, victim)
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)
    outcome = talk.ask(ids)[2]
    assert outcome.n_reused >= 998
    found_damage = talk.store.blocks_quarantined == 1
    assert (outcome.reason is Reason.DAMAGED) == found_damage
    assert ("reason=damaged" in outcome.header) == found_damage


@pytest.mark.parametrize("loaded", ["byte-level"], indirect=True)
def test_damage_of_another_tenants_block_is_not_reported(talk: Conversations) -> None:
    """Another tenant's block is found damaged while a prompt is looked up."""
    ids = sampled_turn(talk.loaded, 300)
    talk.remember(ids, n_prompt=200)
    talk.store.drain()
    lookup = Lookup(Prompt(ids, [ids], ["user"]), talk.root, talk.store, talk.loaded)
    other = replace(talk.root, namespace="them")
    foreign_block = Block(block_key(other.key, b"abcd"), other.key, 0, b"abcd", "")
    talk.store.lose(foreign_block, "a test")
    assert talk.store.blocks_quarantined == 1
    assert "damaged" not in lookup.restore().outcome.header


@pytest.mark.parametrize("loaded", ["byte-level"], indirect=True)
def test_a_few_shared_template_tokens_count_as_nothing_alike(talk: Conversations) -> None:
    ids = sampled_turn(talk.loaded, 300)
    talk.remember(ids, n_prompt=200)
    other = [*ids[:6], *(i + 1 if i < 400 else i - 1 for i in ids[6:250])]
    outcome = talk.ask(other)[2]
    assert (outcome.n_reused, outcome.reason) == (0, Reason.NOTHING_ALIKE)


@pytest.mark.parametrize("loaded", ["byte-level"], indirect=True)
def test_a_prompt_in_ram_is_decoded_and_hashed_once(
    talk: Conversations, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = sampled_turn(talk.loaded, 6 * 256)
    talk.remember(ids, n_prompt=5 * 256)
    decoded, hashed = [0], [0]

    def counting(method: Any) -> Any:
        def counted(self: TokenText, ids: Any, *more: Any) -> Any:
            taken = list(ids)
            decoded[0] += len(taken)
            return method(self, taken, *more)

        return counted

    for name in ("decode", "known_text", "feed", "ends", "n_bytes_ends"):
        monkeypatch.setattr(TokenText, name, counting(getattr(TokenText, name)))

    def counted_key(parent: bytes, packed: bytes) -> bytes:
        hashed[0] += 1
        return block_key(parent, packed)

    for module in (saver_module, block_module):
        monkeypatch.setattr(module, "block_key", counted_key)
    new = sampled_turn(talk.loaded, 80)
    talk.remember([*ids, *new], n_prompt=len(ids) + 40)
    # The last two blocks are decoded again: at the end of the match, and when the turn begins.
    assert decoded[0] <= len(ids) + 40 + 4 * 256, decoded
    assert hashed[0] <= 6 + 4, hashed


@pytest.mark.parametrize("loaded", ["byte-level"], indirect=True)
def test_only_blocks_in_ram_are_joined_in_one_operation(
    talk: Conversations, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = sampled_turn(talk.loaded, 600)
    talk.remember(ids, n_prompt=350)
    ways: list[str] = []

    def recorded(way: str, method: Any) -> Any:
        def call(self: _Buffers) -> None:
            ways.append(way)
            method(self)

        return call

    for way in ("join", "place"):
        monkeypatch.setattr(_Buffers, way, recorded(way, getattr(_Buffers, way)))
    talk.ask([*ids, 5])
    assert ways == ["join"]
    ways.clear()
    talk.forget_hot_blocks()
    talk.ask([*ids, 5])
    assert set(ways) == {"place"}
    ways.clear()
    talk.ask([*ids, 5])  # the blocks are in RAM now
    assert ways == ["join"]


@pytest.mark.parametrize("loaded", ["byte-level"], indirect=True)
def test_blocks_of_a_complete_restore_stay_in_ram(talk: Conversations) -> None:
    ids = sampled_turn(talk.loaded, 300)
    talk.remember(ids, n_prompt=200)
    talk.forget_hot_blocks()
    assert [talk.ask([*ids, 5])[2].n_restored for _ in range(2)] == [300, 0]


def test_another_models_blocks_are_not_found(talk: Conversations) -> None:
    ids = sampled_turn(talk.loaded, 300)
    talk.remember(ids, n_prompt=200)
    other = replace(talk, loaded=replace(talk.loaded, fingerprint="other"))
    assert other.ask(ids)[2].kind is Kind.MISS


def test_without_facts_a_failed_canary_computes_the_prompt(
    talk: Conversations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All blocks are in RAM, so a model with facts runs no canary."""
    ids = [i * 7 % 300 + 5 for i in range(600)]
    talk.remember(ids, 590)
    n_checked = 0

    def differs(*_: Any) -> float:
        nonlocal n_checked
        n_checked += 1
        return 1.0

    monkeypatch.setattr(lookup, "canary_difference", differs)
    assert talk.look_up([*ids, 5, 6]).outcome.n_reused == 600 and n_checked == 0
    talk.loaded = replace(talk.loaded, is_known=False)
    reuse = talk.look_up([*ids, 5, 6])
    assert reuse.caches is None and 0 < n_checked < 10
