"""The segments of a prompt, cut again where its ids have changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..host.prompt import Prompt


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
