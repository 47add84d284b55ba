"""The texts for measuring a precision have the right token ranges, with every tokenizer."""

from __future__ import annotations

import unicodedata
from pathlib import Path

import pytest
from mlx_lm import load

from mlx_lm_kvpersist.cache.live.packed import GRID
from mlx_lm_kvpersist.cache.measuring import divergence
from mlx_lm_kvpersist.cache.measuring.divergence import all_parts, encode, placed

SCRIPTS = {"LATIN", "CYRILLIC", "ARABIC", "DEVANAGARI", "CJK", "HIRAGANA", "HANGUL"}
FORMATS = {"Python", "JSON", "tool calls", "far copy"}
LANGUAGES = set(all_parts()) - FORMATS - {"context"}


def test_texts_cover_many_languages_and_formats() -> None:
    context, *others = all_parts()
    assert context == "context" and FORMATS <= set(others)
    letters = "".join(text for name, text in all_parts().items() if name in LANGUAGES)
    assert {unicodedata.name(char).split()[0] for char in letters if char.isalpha()} >= SCRIPTS
    assert len(LANGUAGES) >= 8


def test_the_far_copy_repeats_a_passage_of_the_context() -> None:
    context, *others = all_parts().values()
    copied = others[-1].partition(": ")[2].strip()
    assert len(copied) > 100 and copied in context
    assert not any(copied in text for text in others[:-1])


@pytest.mark.parametrize("fixture", ["tiny_model", "tiny_model_bos", "tiny_model_spm"])
def test_token_ranges_decode_to_their_texts(fixture: str, request: pytest.FixtureRequest) -> None:
    path: Path = request.getfixturevalue(fixture)
    tokenizer = load(str(path))[1]
    ids, places = placed(tokenizer)
    begin, _ = encode(tokenizer, "")
    assert ids[: len(begin)] == begin
    end = min(place.start for place in places.values())
    assert end >= GRID
    for name, text in list(all_parts().items())[1:]:
        place = places[name]
        assert place.start == end
        end = place.stop
        decoded = tokenizer.decode(ids[place.start : place.stop])
        if name not in LANGUAGES:  # a tiny vocabulary may lack other scripts
            assert decoded.strip() == text.strip()
    assert end == len(ids)


def test_a_short_context_is_repeated(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = load(str(tiny_model))[1]
    texts = {"before": "a b c ", "after": "d"}
    monkeypatch.setattr(divergence, "all_parts", lambda: texts)
    ids, places = placed(tokenizer)
    n_once = len(encode(tokenizer, "a b c ")[1])
    assert GRID <= places["after"].start < GRID + n_once
    assert places["after"].start % n_once == 0
    assert list(places["after"]) == [len(ids) - 1]


def test_begin_token_is_used_if_the_tokenizer_has_it(
    tiny_model: Path, tiny_model_bos: Path
) -> None:
    for path, expected in ((tiny_model, False), (tiny_model_bos, True)):
        tokenizer = load(str(path))[1]
        begin, ids = encode(tokenizer, "The lock")
        assert bool(begin) == expected
        assert tokenizer.decode(ids) == "The lock"
