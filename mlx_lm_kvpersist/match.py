"""Match a prompt with the tree of stored blocks, and replace its first ids by stored ids.

The stored ids are found by the text that they decode to, or by the ids themselves.
"""

from __future__ import annotations

import codecs
import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, compress, count, takewhile
from math import ceil, inf
from typing import Any, Literal, NamedTuple, Protocol

from .block import Block, pack_ids, unpack_ids
from .image_ids import GOES_ON, before_image, text_of

Encode = Callable[[str], list[int]]
"""Encodes text to token ids; special tokens are recognised, but none are added."""

SHOWN_CHARS = 40
"""At a divergence, at most this number of characters is shown of each text."""

AHEAD = 8192
"""Characters or bytes of a prompt that a source gets at a time: more than a block usually has."""

REPLACEMENT = "\ufffd"
"""Stands for an incomplete or invalid UTF-8 sequence (Unicode 15, section 3.9)."""


class _Unknown(bytes):
    """The bytes of a token without known bytes."""


_UNKNOWN = _Unknown(b"\xff")  # an invalid byte


class _Pieces(dict[int, bytes]):
    """The bytes of tokens by their ids; an image's first token has the image's digest.

    Most vocabularies have more than 100,000 tokens, so the bytes are found when they are needed.
    """

    def __init__(self, find: Callable[[int], bytes | None]) -> None:
        self._find = find

    def __missing__(self, token_id: int) -> bytes:
        if token_id < 0:
            return text_of(token_id).encode()
        piece = self[token_id] = self._find(token_id) or _UNKNOWN
        return piece


class _Decoder(codecs.BufferedIncrementalDecoder):
    def _buffer_decode(self, data: Any, errors: str, final: bool) -> tuple[str, int]:
        text, n_used = codecs.utf_8_decode(data, errors, final)
        if data[n_used : n_used + 1] == b"\xed" and data[n_used + 1 : n_used + 2] >= b"\xa0":
            # Half a surrogate: CPython waits for more bytes, although no byte can complete it.
            return text + 2 * REPLACEMENT, n_used + 2
        return text, n_used


_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


class TokenText:
    """The bytes of every token of a vocabulary, by token id.

    Text is decoded as a client sees it: UTF-8 with replacement characters. The bytes of an
    incomplete character at the end of a sequence are called `pending`. A token without known bytes
    decodes to a replacement character, so ask `covers` before comparing texts.

    Ordinary tokens can spell the text of a control token or of an image. So two texts are the same
    prompt only if their `controls` are equal, too.
    """

    def __init__(
        self, find: Callable[[int], bytes | None], controls: Collection[int] = frozenset()
    ) -> None:
        """`find` returns the bytes of a token, or None. `controls`: the ids of control tokens."""
        self._pieces, self._controls = _Pieces(find), controls

    @classmethod
    def of(cls, tokenizer: Any) -> TokenText | None:
        """Read the vocabulary of a Hugging Face fast tokenizer, also in mlx-lm's wrapper.

        Returns None unless its decoder is like byte-level BPE's or SentencePiece's.
        """
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None or backend.decoder is None:
            return None
        kinds = _decoder_kinds(json.loads(backend.decoder.__getstate__()))
        if "ByteLevel" in kinds:
            to_bytes = _byte_level_piece
        elif "Metaspace" in kinds or {"Replace", "ByteFallback"} <= kinds:
            to_bytes = _sentencepiece_piece
        else:
            return None
        added = set(tokenizer.get_added_vocab().values())

        def find(token_id: int) -> bytes | None:
            if (token := backend.id_to_token(token_id)) is None:
                return None
            # With byte-level BPE, added tokens have no stand-in characters.
            is_plain = token_id in added and to_bytes is _byte_level_piece
            return token.encode() if is_plain else to_bytes(token)

        return cls(find, added)

    def covers(self, ids: Iterable[int]) -> bool:
        """Whether the bytes of all tokens are known, so that their text can be compared."""
        return all(map(self._is_known, set(ids)))

    def _is_known(self, token_id: int) -> bool:
        return token_id < 0 or self._pieces[token_id] is not _UNKNOWN

    def control_places(self, ids: Sequence[int]) -> list[int]:
        """Return the positions of control tokens, images' tokens and unknown tokens in ids."""
        controls = {i for i in set(ids) if i < 0 or i in self._controls or not self._is_known(i)}
        return list(compress(count(), map(controls.__contains__, ids))) if controls else []

    def controls(self, ids: Sequence[int], pending: bytes = b"") -> list[tuple[int, int]]:
        """Return a pair for each control token, unknown token, and first token of an image.

        The pair has the number of characters before the token, and the token's id.
        """
        controls, n_chars, start = [], 0, 0
        for place in self.control_places(ids):
            text, pending = self.feed(ids[start : place + 1], pending)
            n_chars, start = n_chars + len(text), place + 1
            if ids[place] != GOES_ON:
                controls.append((n_chars - len(self.decode(ids[place:start])), ids[place]))
        return controls

    def n_bytes_ends(self, ids: Iterable[int]) -> list[int]:
        """Return the byte offset at which each token ends."""
        return list(accumulate(len(self._pieces[i]) for i in ids))

    def to_bytes(self, ids: Iterable[int]) -> bytes:
        return b"".join(map(self._pieces.__getitem__, ids))

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of a whole sequence; an incomplete character at its end is replaced."""
        return self.to_bytes(ids).decode("utf-8", "replace")

    def known_text(self, ids: Sequence[int]) -> str | None:
        return self.to_bytes(ids).decode("utf-8", "replace") if self.covers(ids) else None

    def known_beginning(self, ids: Iterable[int], pending: bytes = b"") -> str:
        """Return the characters that are complete before the first token without known bytes."""
        return self.feed(takewhile(self._is_known, ids), pending)[0]

    def feed(self, ids: Iterable[int], pending: bytes = b"") -> tuple[str, bytes]:
        """Decode the next tokens of a sequence; return their text and the pending bytes."""
        decoder = _Decoder("replace")
        decoder.setstate((pending, 0))
        text = decoder.decode(self.to_bytes(ids))
        return text, decoder.getstate()[0]

    def ends(
        self, ids: Iterable[int], pending: bytes = b"", max_chars: float = inf
    ) -> list[tuple[int, bool]]:
        """Return for each token how many characters are complete, and whether bytes are pending.

        The list ends with the first token that ends after `max_chars`.
        """
        decoder = _Decoder("replace")
        decoder.setstate((pending, 0))
        ends, n_chars = [], 0
        for token_id in ids:
            n_chars += len(decoder.decode(self._pieces[token_id]))
            ends.append((n_chars, bool(decoder.getstate()[0])))
            if n_chars > max_chars:
                break
        return ends


def n_chars_alike(
    stored: Sequence[tuple[int, int]], own: Sequence[tuple[int, int]], position: int, n_chars: int
) -> int:
    """Return how many of `n_chars` equal characters precede the first unequal control token.

    stored: `TokenText.controls` of the block at `position`. own: the controls of the prompt.
    """
    first, stop = (bisect_left(own, (end,)) for end in (position, position + n_chars))
    controls = {(start - position, token_id) for start, token_id in own[first:stop]}
    return min([n_chars, *(start for start, _ in controls.symmetric_difference(stored))])


def _decoder_kinds(decoder: dict[str, Any]) -> set[str]:
    kinds = {decoder["type"]}
    for inner in decoder.get("decoders", ()):
        kinds |= _decoder_kinds(inner)
    return kinds


_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
"""The bytes that stand for themselves in GPT-2's vocabulary. U+0100 and the characters after it
stand for the rest, in order (openai/gpt-2, src/encoder.py, bytes_to_unicode)."""
_OTHERS = sorted({*range(0x100)}.difference(_PRINTABLE))
_LATIN_1 = {
    **{byte: chr(byte if byte in _PRINTABLE else 0x100) for byte in range(0x100)},
    **{0x100 + n: chr(byte) for n, byte in enumerate(_OTHERS)},
}
"""Maps a stand-in character to its byte in Latin-1, which cannot encode the other characters."""


def _byte_level_piece(token: str) -> bytes:
    try:
        return token.translate(_LATIN_1).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()


def _sentencepiece_piece(token: str) -> bytes:
    if byte := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(byte[1], 16)])
    return token.replace("\u2581", " ").encode()


class BlockSource(Protocol):
    """A source of stored blocks, to walk down their tree."""

    def children(
        self, parent: bytes, ahead: str | bytes | None = None, limit: int | None = None
    ) -> Sequence[Block]:
        """Return at most `limit` blocks that continue `parent`.

        `ahead` is the next text, or the next packed ids, of a prompt. The result may omit a
        block if another block shares as much with `ahead`, or more.
        """


def beginnings(block: Block, source: BlockSource) -> list[Block]:
    """Return the shorter blocks with the same parent whose ids are the first ids of `block`."""
    return [
        sibling
        for sibling in source.children(block.parent, block.packed_ids)
        if sibling.n_tokens < block.n_tokens
        and block.packed_ids.startswith(sibling.packed_ids)
        and sibling.is_genuine
    ]


@dataclass(frozen=True)
class Match:
    """The stored blocks that match the beginning of a prompt.

    The first `n_tokens` tokens of `path` are the prompt's first `n_chars` characters. If an image
    is stored only in part, `n_tokens` excludes it, and `n_chars` includes its text. `at_end`:
    nothing is stored after these tokens on this branch.

    In a match by text, the nearest stored text begins with the prompt's first `n_agreed` characters
    and continues with `stored_next`. `n_agreed` may exceed `n_chars`, because the match ends at the
    end of a token.
    """

    path: tuple[Block, ...]
    n_tokens: int
    n_chars: int
    at_end: bool
    n_agreed: int = 0
    stored_next: str = ""

    @property
    def packed_ids(self) -> bytes:
        packed = b"".join(node.packed_ids for node in self.path)
        if self.has_text_only:
            return packed[: 4 * self.n_tokens]
        return pack_ids(unpack_ids(packed)[: self.n_tokens])

    @property
    def ids(self) -> list[int]:
        return unpack_ids(self.packed_ids)

    @property
    def has_text_only(self) -> bool:
        return all(node.has_text_only for node in self.path)


NO_MATCH = Match(path=(), n_tokens=0, n_chars=0, at_end=False)


def match_prompt(
    source: BlockSource,
    root: bytes,
    prompt: str | bytes,
    tokens: TokenText | None = None,
    packed_ids: bytes = b"",
) -> Match:
    """Find a prompt's longest stored prefix of whole tokens and whole images.

    With `tokens`, the prompt is a text; otherwise it is packed ids, and `n_chars` counts bytes.
    `packed_ids` are the ids of the text; give them only if `tokens` covers them all. The match then
    ends before a control token that the store or the prompt spells with ordinary tokens.
    """
    best, n_best, n_used = None, 0, 0
    steps = _steps(source, root, prompt, tokens, packed_ids)
    for step in steps:
        # A stored incomplete character may add one character to the match.
        if step.position + step.n_equal + 1 <= n_best:
            break
        n_tokens, n_chars = _cut(step, prompt, tokens)
        n_more = step.position + n_chars - n_best
        if best is not None and n_more == 0 and not step.node.has_text_only:
            # An image's other tokens add no characters, so tokens are compared.
            n_more = step.node.start + n_tokens - best.node.start - n_used
        if n_tokens and n_more > 0:
            best, n_best, n_used = step, step.position + n_chars, n_tokens
    match = NO_MATCH
    if best is not None:
        path = [node := best.node]
        at_end = n_used == node.n_tokens and not source.children(node.key, limit=1)
        while (best := best.before) is not None:
            path.append(best.node)
        match = Match(tuple(reversed(path)), node.start + n_used, n_best, at_end)
        if not match.has_text_only:
            own = prompt if isinstance(prompt, bytes) else packed_ids
            match = _out_of_image(match, unpack_ids(own))
    if tokens is None or not steps:
        return match
    farthest = steps[0]
    stored_next = farthest.node.text[farthest.n_equal :][:SHOWN_CHARS]
    for child in source.children(farthest.node.key, limit=1) if not stored_next else ():
        stored_next = child.text[:SHOWN_CHARS]
    return replace(match, n_agreed=farthest.position + farthest.n_equal, stored_next=stored_next)


def _out_of_image(match: Match, prompt: Sequence[int]) -> Match:
    stored = match.ids
    n_images = sum(token_id < 0 for token_id in stored)
    of_images = [token_id for token_id in prompt if token_id < 0]
    if of_images[n_images : n_images + 1] != [GOES_ON]:
        return match
    n_tokens = before_image([*stored, GOES_ON], len(stored))
    path = tuple(node for node in match.path if node.start < n_tokens)
    return replace(match, path=path, n_tokens=n_tokens, at_end=False)


@dataclass(frozen=True)
class _Step:
    """A block; its first `n_equal` characters (or bytes of ids) equal the prompt at `position`.

    If the block begins inside a character, `pending` has that character's first bytes. `ids_end`:
    the end of the block's packed ids, counted from the root. `has_own_ids`: whether all ids up to
    this end are the prompt's own.
    """

    node: Block
    before: _Step | None
    pending: bytes
    position: int
    n_equal: int
    ids_end: int
    has_own_ids: bool


def _steps(
    source: BlockSource,
    root: bytes,
    prompt: str | bytes,
    tokens: TokenText | None,
    packed_ids: bytes,
) -> list[_Step]:
    """Return all blocks that were compared with the prompt, the longest agreement first.

    A block with a wrong start or key is skipped, because an index may be damaged.
    """
    steps: list[_Step] = []
    own: list[tuple[int, int]] | None = None
    open_ends: list[tuple[bytes, int, _Step | None]] = [(root, 0, None)]
    while open_ends:
        parent, position, before = open_ends.pop()
        n_tokens, pending, ids_end, begins_own = 0, b"", 0, True
        if before is not None:
            n_tokens, pending, ids_end = before.node.stop, before.node.pending, before.ids_end
            begins_own = before.has_own_ids
        for node in source.children(parent, prompt[position : position + AHEAD]):
            if node.start != n_tokens or not node.is_genuine:
                continue
            content: Any = node.packed_ids if tokens is None else node.text
            has_same_ids = packed_ids.startswith(node.packed_ids, ids_end)
            is_known = tokens is None or has_same_ids or tokens.covers(node.ids)
            if tokens is not None and not is_known:
                # The text of an unknown token does not identify its id.
                content = tokens.known_beginning(node.ids, pending)
            is_whole = is_known and prompt.startswith(content, position)
            n_equal = len(content) if is_whole else common_prefix(content, prompt, position)
            if tokens is not None and packed_ids and n_equal and not has_same_ids:
                if own is None:
                    own = tokens.controls(unpack_ids(packed_ids))
                n_alike = n_chars_alike(tokens.controls(node.ids, pending), own, position, n_equal)
                is_whole, n_equal = is_whole and n_alike == n_equal, n_alike
            end = ids_end + len(node.packed_ids)
            is_own = begins_own and has_same_ids
            step = _Step(node, before, pending, position, n_equal, end, is_own)
            steps.append(step)
            if is_whole:
                open_ends.append((node.key, position + n_equal, step))
    return sorted(steps, key=lambda step: -step.position - step.n_equal)


def common_prefix(content: Any, prompt: Any, position: int) -> int:
    """Return how many first items of `content` equal the items of `prompt` from `position` on.

    Both are texts, bytes, or ids in tuples. The number is found by bisection.
    """
    low, high = 0, min(len(content), len(prompt) - position)
    while low < high:
        middle = (low + high + 1) // 2
        if content[low:middle] == prompt[position + low : position + middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _cut(step: _Step, prompt: Any, tokens: TokenText | None) -> tuple[int, int]:
    """Return how many tokens of a block are in the common part, and their number of characters.

    A token that ends inside a character counts if the prompt has a replacement character there, or
    if the prompt has the same ids up to the end of the block.
    """
    node, n_equal = step.node, step.n_equal
    if tokens is None:
        id_ends = [0, *accumulate(len(pack_ids([token_id])) for token_id in node.ids)]
        n_tokens = bisect_right(id_ends, n_equal) - 1
        return n_tokens, id_ends[n_tokens]
    if n_equal == len(node.text) and (step.has_own_ids or not node.pending):
        return node.n_tokens, n_equal
    ends = tokens.ends(node.ids, step.pending, n_equal)
    for n_tokens in range(len(ends), 0, -1):
        n_chars, incomplete = ends[n_tokens - 1]
        if n_chars > n_equal:
            continue
        if not incomplete:
            return n_tokens, n_chars
        if prompt.startswith(REPLACEMENT, step.position + n_chars):
            return n_tokens, n_chars + 1
    return 0, 0


FEW = 16
"""If a block has at most this number of children, all children are compared with the prompt."""

MAX_ALIKE = 64
"""At most this number of blocks with the same text is compared with the prompt."""

_MAX_STEPS = 64

Find = Callable[[Literal[">", "<="], "str | bytes"], list[Block]]
"""With ">", finds the first block after a text or ids in sorted order. With "<=", finds the last
block up to this place, and blocks of equal content."""


def nearest(ahead: str | bytes, find: Find) -> list[Block]:
    """Return the blocks whose text (or packed ids, for bytes) has most in common with `ahead`.

    In sorted order, these blocks are next to `ahead`. Only a block that is a prefix of `ahead` can
    be further away: "ab" is before "abc" for `ahead` "abz". So the search is repeated with the
    common beginning of `ahead` and the block that was found last.
    """
    nodes = find(">", ahead)
    key = ahead
    for _ in range(_MAX_STEPS):
        before = find("<=", key)
        if not before:
            break
        content = before[0].text if isinstance(ahead, str) else before[0].packed_ids
        nodes += before
        if not content:
            break
        n_common = common_prefix(content, ahead, 0)
        # If the whole block is a prefix of `ahead`, only shorter blocks can still matter.
        key = ahead[: n_common - 1 if n_common == len(content) else n_common]
    return nodes


class Splice(NamedTuple):
    """A prompt whose first `n_stored` ids come from the store."""

    ids: list[int]
    n_stored: int


def splice(
    prompt: Sequence[int], text: str, match: Match, tokens: TokenText, encode: Encode
) -> Splice | None:
    """Return the prompt with the matched ids in front; None if text or control tokens would change.

    `text` is the decoded `prompt`. If the match ends inside a stored branch, it is cut back to the
    end of a token that the prompt also has. At the end of a stored branch, if no token of the
    prompt begins there, the rest of the text is encoded again.
    """
    n_same = n_chars = n_nodes = 0
    for node in match.path:
        is_same = pack_ids(prompt[node.start : node.stop]) == node.packed_ids
        if node.pending or node.stop >= match.n_tokens or not is_same:
            break
        n_same, n_chars, n_nodes = node.stop, n_chars + len(node.text), n_nodes + 1
    own, text = prompt[n_same:], text[n_chars:]
    stored = unpack_ids(b"".join(node.packed_ids for node in match.path[n_nodes:]))
    stored = stored[: match.n_tokens - n_same]
    ends, stored_ends = _ends(own, text, tokens), _ends(stored, text, tokens)
    if match.at_end:
        tail = list(own[bisect_right(ends, ceil(stored_ends[-1])) :])
        if tokens.decode(stored + tail) != text:
            tail = _encode_rest(text[match.n_chars - n_chars :], tokens, encode)
    else:
        # The text after the match can change the tokens of the match's last word, and so the reply.
        n_stored, n_own = _common_boundary(own, ends, stored, stored_ends)
        stored, tail = stored[:n_stored], list(own[n_own:])
    if not (n_same or stored) or tokens.decode(stored + tail) != text:
        return None
    if tokens.controls(stored + tail) != tokens.controls(own):
        return None
    return Splice([*prompt[:n_same], *stored, *tail], n_same + len(stored))


def _ends(ids: Sequence[int], text: str, tokens: TokenText) -> Sequence[float]:
    """Return each token's end in bytes, or in characters if `text` has a replacement character.

    A replacement character has three bytes, but may stand for one invalid byte. Without such
    characters, bytes are counted, ten times as fast. An end inside a character adds 1/2.
    """
    if REPLACEMENT in text:
        return [n_chars + incomplete / 2 for n_chars, incomplete in tokens.ends(ids)]
    return tokens.n_bytes_ends(ids)


def _common_boundary(
    prompt: Sequence[int],
    ends: Sequence[float],
    stored: Sequence[int],
    stored_ends: Sequence[float],
) -> tuple[int, int]:
    """Return the numbers of stored ids and of own ids up to the last token that both have."""
    place = {end: i for i, end in enumerate(ends)}
    for n in range(len(stored), 0, -1):
        i = place.get(stored_ends[n - 1])
        if i is not None and prompt[i] == stored[n - 1]:
            return n, i + 1
    return 0, 0


def _encode_rest(rest: str, tokens: TokenText, encode: Encode) -> list[int]:
    """Encode text from the middle of a prompt.

    SentencePiece-like tokenizers put a space before the text, but not after a line break.
    """
    ids = encode(rest)
    if tokens.decode(ids) != rest:
        anchor, anchored = encode("\n"), encode("\n" + rest)
        if anchored[: len(anchor)] == anchor:
            ids = anchored[len(anchor) :]
    return ids
