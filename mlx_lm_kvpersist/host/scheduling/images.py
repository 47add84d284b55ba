"""The images of a prompt: ids that identify them in every comparison of prompts.

The model reads the same ids for all images of one size. mlx-lm tells images apart by 60 bits of
their URLs' hash. Here an image's first id is made from the SHA-256 of its processed pixels
(`image_ids`), so another format or URL of the same pixels is the same image.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

from ...image_ids import GOES_ON, first_id
from ..attachments import IMAGE_KINDS


def with_images(prompt: Sequence[int], vision: Any) -> list[int]:
    """Return a prompt's ids with `image_ids` for images. vision: mlx-lm's record of images."""
    keys = zip(prompt, vision.cache_key, strict=True)
    ids = [GOES_ON if key < 0 else token for token, key in keys]
    for start, pixels in zip(vision.starts, vision.pixel_values, strict=True):
        floats = np.ascontiguousarray(pixels.astype(mx.float32))
        digest = hashlib.sha256(repr(floats.shape).encode())
        digest.update(floats.data)
        ids[start] = first_id(digest.digest())
    return ids


def named(messages: Sequence[Mapping[str, Any]], ids: Sequence[int]) -> list[Mapping[str, Any]]:
    """Return messages with the images' ids, in hexadecimal, instead of the images.

    The same conversation then has the same messages, in whatever form a client sends images.
    """
    names = (f"{-token:x}" for token in ids if token < GOES_ON)
    renamed = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            content_parts = [
                {"type": "image", "image": next(names)} if item["type"] in IMAGE_KINDS else item
                for item in content
            ]
            message = {**message, "content": content_parts}
        renamed.append(message)
    return renamed


def fed_images(fed: Sequence[int], prompt: Sequence[int], vision: Any) -> tuple[list[int], Any]:
    """Return the ids that the model reads for a prompt, and mlx-lm's record of the prompt's images.

    fed: the prompt with ids of `image_ids`; mlx-lm uses it as the key of the caches. prompt,
    vision: the rendered ids and images.
    """
    patch = prompt[vision.starts[0]]
    starts = [place for place, key in enumerate(fed) if key < GOES_ON]
    read = [patch if key < 0 else key for key in fed]
    return read, replace(vision, starts=starts, cache_key=fed)
