"""A text in pieces is cut at its first complete stop word, and sent as early as possible."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mlx_lm_kvpersist.host.http.completion import StopWords

PIECES = st.lists(st.text("ab ", max_size=4), max_size=12)
WORDS = st.lists(st.text("ab ", max_size=4), max_size=3)


def first_stop(text: str, words: list[str]) -> tuple[str, str | None]:
    """Return the text before the stop word that is complete first, and that word."""
    for end in range(len(text) + 1):
        complete = [word for word in words if word and text[:end].endswith(word)]
        if complete:
            word = max(complete, key=len)
            return text[: end - len(word)], word
    return text, None


@given(PIECES, WORDS)
def test_the_text_is_cut_at_the_first_stop_word(pieces: list[str], words: list[str]) -> None:
    stops, shown = StopWords(words), ""
    for n, piece in enumerate(pieces, start=1):
        shown += stops.cut(piece)
        so_far = "".join(pieces[:n])
        if stops.found is None:
            withheld = so_far[len(shown) :]
            assert so_far.startswith(shown)
            assert not withheld or any(
                word.startswith(withheld) and word != withheld for word in words
            )
    shown += stops.rest()
    assert (shown, stops.found) == first_stop("".join(pieces), words)


@given(st.text("ab "), WORDS, st.data())
def test_result_does_not_depend_on_the_division_into_pieces(
    text: str, words: list[str], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)))))
    whole, pieces = StopWords(words), StopWords(words)
    shown = whole.cut(text) + whole.rest()
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert "".join(map(pieces.cut, parts)) + pieces.rest() == shown
    assert pieces.found == whole.found
