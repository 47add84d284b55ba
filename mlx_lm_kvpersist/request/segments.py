"""The segments of a prompt, cut again where its ids have changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..host.prompt import Prompt
from ..match.tree import common_prefix
from .model import LoadedModel


def with_ids(prompt: Prompt, ids: list[int], boundaries: Mapping[int, int]) -> Prompt:
    """Return the prompt with other ids, cut where it was cut, as far as a token ends there.

    boundaries: number of tokens before a place in the old ids -> in the new ids.
    """
    segments, types = [], []
    start = end = 0
    for segment, segment_type in zip(prompt.segments, prompt.segment_types, strict=True):
        end += len(segment)
        stop = len(ids) if end == len(prompt.ids) else boundaries.get(end)
        if stop is not None and stop > start:
            segments.append(ids[start:stop])
            types.append(segment_type)
            start = stop
    return replace(prompt, ids=ids, segments=segments, segment_types=types)


def with_text(prompt: Prompt, text: str, model: LoadedModel) -> Prompt:
    """Return the prompt that `text`, another spelling of it, encodes to, cut where it was cut.

    A cut is found again by the text before it, or by the text behind it. The prompt stays as it is
    where the bytes of an id are not known.
    """
    assert model.text is not None
    ids = model.encode(text)
    if not model.text.covers((*ids, *prompt.ids)):
        return prompt
    old_ends = [0, *model.text.n_bytes_ends(prompt.ids)]
    new_ends = [0, *model.text.n_bytes_ends(ids)]
    from_start = {end: i for i, end in enumerate(new_ends)}
    from_end = {new_ends[-1] - end: i for i, end in enumerate(new_ends)}
    n_same = common_prefix(text, model.text.decode(prompt.ids), 0)
    n_same_bytes = len(text[:n_same].encode())
    boundaries = {}
    for i, end in enumerate(old_ends):
        place = from_start.get(end) if end <= n_same_bytes else from_end.get(old_ends[-1] - end)
        if place is not None:
            boundaries[i] = place
    return with_ids(prompt, ids, boundaries)
