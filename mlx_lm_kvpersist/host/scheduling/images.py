"""The images of a prompt: ids that tell them apart, wherever a prompt is looked for.

The model reads the same ids for every image of a size. Stock tells images apart by 60 bits of their
URLs; here the first token of an image is its whole SHA-256, and the others go on from there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import numpy as np

from ..attachments import IMAGE_KINDS

GOES_ON = -1
"""The id of all tokens of an image but the first."""


def vision_of(tokenized: Sequence[Any]) -> Any:
    """Return stock's record of a prompt's images from what `_tokenize` returns, or None.

    mlx-lm 0.31.3 returns none.
    """
    return tokenized[4] if len(tokenized) > 4 else None


def with_images(prompt: Sequence[int], vision: Any) -> list[int]:
    """Return the ids of a prompt with those of its images in the place of patch tokens.

    vision: stock's record of its images. What counts is what the model is given of an image, after
    the processor: another format or place of the same pixels is the same image.
    """
    keys = zip(prompt, vision.cache_key, strict=True)
    ids = [GOES_ON if key < 0 else one for one, key in keys]
    for start, pixels in zip(vision.starts, vision.pixel_values, strict=True):
        ids[start] = _image_id(pixels)
    return ids


def _image_id(pixels: mx.array) -> int:
    """Return the id of an image's first token: the SHA-256 of what a model is given of it.

    It is below -(2**256).
    """
    floats = np.ascontiguousarray(pixels.astype(mx.float32))
    digest = hashlib.sha256(repr(floats.shape).encode())
    digest.update(floats.data)
    return -int.from_bytes(b"\1" + digest.digest(), "big")


def named(messages: Sequence[Mapping[str, Any]], ids: Sequence[int]) -> list[Mapping[str, Any]]:
    """Return messages with the ids of their images, in hexadecimal, in the place of these.

    The same conversation then has the same messages, however its images come.
    """
    names = (f"{-one:x}" for one in ids if one < GOES_ON)
    found = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            parts = [
                {"type": "image", "image": next(names)} if part["type"] in IMAGE_KINDS else part
                for part in content
            ]
            message = {**message, "content": parts}
        found.append(message)
    return found


@dataclass
class Images:
    """The images of a prompt that is fed, for a model that computes it in chunks.

    The model reads the ids `read`. `vision` is stock's record of the images, by what is fed.
    """

    read: list[int]
    vision: Any
    _start: int = 0
    _rows: mx.array | None = None
    """What the tokens from `_start` on are embedded as, [N, D]."""

    @classmethod
    def of(cls, fed: Sequence[int], prompt: Sequence[int], vision: Any) -> Images:
        """Return the images of `fed`, ids of `with_images`; `prompt` and `vision` as rendered.

        `fed` becomes the key of what is computed.
        """
        patch = prompt[vision.starts[0]]
        starts = [place for place, one in enumerate(fed) if one < GOES_ON]
        read = [patch if one < 0 else one for one in fed]
        return cls(read, replace(vision, starts=starts, cache_key=fed))

    def begin_of(self, position: int) -> int:
        """Return where the image begins that goes on at a position; without one, the position."""
        while self.vision.cache_key[position] == GOES_ON:
            position -= 1
        return position

    def embedded(self, model: Any, start: int, stop: int) -> mx.array | None:
        """Return what the tokens from `start` on are embedded as, up to `stop` at most: [1, N, D].

        Where images are among them; else None. An image is computed as a whole, once: `start` is
        where this stopped, or no image goes on there.
        """
        ids = self.vision.cache_key
        if self._rows is None:
            if min(ids[start:stop]) >= 0:
                return None
            end = stop
            while end < len(ids) and ids[end] == GOES_ON:
                end += 1
            both = zip(self.vision.starts, self.vision.pixel_values, strict=True)
            pixels = [one for place, one in both if start <= place < end]
            self._start = start
            self._rows = model.embed_inputs(mx.array(self.read[start:end]), pixel_values=pixels)
            mx.eval(self._rows)
        rows = self._rows[start - self._start : stop - self._start]
        if start + len(rows) == self._start + len(self._rows):
            self._rows = None
        return rows[None]
