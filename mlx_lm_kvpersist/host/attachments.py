"""Images and files in messages: a line of text replaces content that the model cannot read.

A client sends the whole conversation with each turn. So an attachment is refused only in the newest
question. In other messages the same line always replaces it, so the prompt stays the same.

After a refusal, Claude Code's next message has the attachment, the text sent with it, and the new
question. A second refusal would end the conversation.
"""

from __future__ import annotations

import re
from typing import Any

from ..apis import parts_of, refuse
from ..errors import RequestRefused

IMAGE_KINDS = ("image_url", "input_image", "image")
PART_KINDS = (
    *("text", *IMAGE_KINDS, "file", "input_file", "document", "container_upload"),
    *("audio", "audio_url", "input_audio", "video", "video_url", "input_video"),
)
"""The types of message parts that clients send. Models read only text and images."""
_TAGS = re.compile(r"\s*(</[\w-]+>|<([\w-]+)>.*</\2>)\s*", re.DOTALL)
"""A text that the client adds to the user's words: a closing tag, or an element such as
`system-reminder`. Codex writes a tag on each side of an image, before the question."""
_MEDIA_TYPE = re.compile(r"data:([\w.+-]+/[\w.+-]+)")

Message = dict[str, Any]
Part = dict[str, Any]


def fit_attachments(messages: list[Message], reads_images: bool) -> list[Message]:
    """Return the messages; a line of text replaces each part that the model cannot read.

    `check_messages` must have accepted them. Raises RequestRefused if the question has such a part.
    """
    question = _question(messages)
    fitted: list[Message] = []
    for i, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list):
            content = [_told(block) for block in content]
            unread = [
                block
                for j, block in enumerate(content)
                if not _is_read(block, reads_images) and not _is_followed_up(content, j)
            ]
            if unread and i == question:
                if (kind := unread[0]["type"]) not in PART_KINDS:
                    name = f"the newest message's content[{content.index(unread[0])}].type"
                    refuse(name, kind, "text, image_url or file")
                raise RequestRefused(
                    f"the newest message has {_name(unread[0])}, expected text"
                    f"{' or images' * reads_images}: this model reads nothing else; "
                    "send the message without it"
                )
            readable_parts = [_readable_part(content, j, reads_images) for j in range(len(content))]
            message = {**message, "content": readable_parts}
        fitted.append(message)
    return _images_moved(fitted) if reads_images else fitted


def _told(block: Part) -> Part:
    """Return a part. A part of an unknown type, such as "refusal", becomes a text part."""
    kind, text = block["type"], block.get("text")
    if kind in PART_KINDS and (kind != "text" or text is not None):
        return block
    text = "" if kind == "text" else block.get(kind) if text is None else text
    return _text(text) if isinstance(text, str) else block


def _images_moved(messages: list[Message]) -> list[Message]:
    """Put the images of tools' results into the next user message, where templates expect them."""
    moved: list[Message] = []
    images: list[Part] = []
    for message in messages:
        content, role = message.get("content"), message.get("role")
        if role == "tool" and isinstance(content, list):
            images += (block for block in content if block["type"] != "text")
            texts = [block for block in content if block["type"] == "text"]
            message = {**message, "content": texts}
        elif images and role != "tool":
            if role == "user":
                message = {**message, "content": images + parts_of(content)}
            else:
                moved.append({"role": "user", "content": images})
            images = []
        moved.append(message)
    return [*moved, {"role": "user", "content": images}] if images else moved


def _question(messages: list[Message]) -> int | None:
    """Return the index of the user's question if the conversation ends with one.

    A user's message after a tool's result is a part of the result, which later turns repeat.
    """
    question = None
    for i in reversed(range(len(messages))):
        role = messages[i].get("role")
        if role == "user" and question is None:
            question = i
        elif role == "assistant":
            break
        elif role not in ("user", "system", "developer"):
            return None
    return question


def _is_followed_up(content: list[Part], i: int) -> bool:
    """Tell whether two texts follow a part: the text sent with it and a new question."""
    texts = [str(block["text"]) for block in content[i + 1 :] if block["type"] == "text"]
    return len([text for text in texts if not _TAGS.fullmatch(text)]) > 1


def _is_read(block: Part, reads_images: bool) -> bool:
    if block["type"] in IMAGE_KINDS:
        return reads_images and isinstance(_source(block).get("url"), str)
    return bool(block["type"] == "text")


def _readable_part(contents: list[Part], i: int, reads_images: bool) -> Part:
    """Return a part, or the line that replaces it, with line breaks: templates add none."""
    if _is_read(contents[i], reads_images):
        return contents[i]
    readable = "text and images" if reads_images else "text"
    line = f"[{_name(contents[i])}, not shown: this model reads {readable} only]"
    return _text("\n" * (i > 0) + line + "\n" * (i + 1 < len(contents)))


def _text(text: str) -> Part:
    return {"type": "text", "text": text}


def _source(block: Part) -> dict[str, Any]:
    """Return the object with a part's content: `url` or `file_data`, perhaps a `filename`."""
    source = block.get("image_url", block.get("image", block.get("file")))
    return source if isinstance(source, dict) else {"url": source}


def _name(block: Part) -> str:
    """Return a description of a part, such as "report.pdf, application/pdf"."""
    kind, source = block["type"], _source(block)
    media_type = _MEDIA_TYPE.match(str(source.get("url") or source.get("file_data")))
    what: str = media_type[1] if media_type else "image" if kind in IMAGE_KINDS else kind
    filename = source.get("filename")
    is_named = isinstance(filename, str) and filename and filename.isprintable()
    return f"{filename}, {what}" if is_named else what
