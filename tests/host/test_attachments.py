"""Images and files in messages, for models that read them and for models that do not."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest

from mlx_lm_kvpersist.errors import RequestRefused
from mlx_lm_kvpersist.host.attachments import fit_attachments
from mlx_lm_kvpersist.host.scheduling.model_provider import renders_images

Message = dict[str, Any]

PNG = {"type": "image_url", "image_url": {"url": "data:image/png;base64,QQ=="}}
LINE = "[image/png, not shown: this model reads text only]"
CALL = {"role": "assistant", "content": "", "tool_calls": []}
GO_ON = {"role": "user", "content": "Go on."}


def text(text: str) -> Message:
    return {"type": "text", "text": text}


def user(*parts: Message) -> Message:
    return {"role": "user", "content": list(parts)}


def result(*parts: Message) -> Message:
    return {"role": "tool", "tool_call_id": "1", "content": list(parts)}


def texts(messages: list[Message]) -> list[str]:
    """Return the text of each message as stock joins it, and "IMAGE" for an image."""
    contents = (message["content"] for message in messages)
    return [
        content
        if isinstance(content, str)
        else "".join(part.get("text", "IMAGE") for part in content)
        for content in contents
    ]


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("image/png", PNG),
        ("image/jpeg", {"type": "input_image", "image_url": "data:image/jpeg;base64,QQ=="}),
        ("image", {"type": "image", "image": "https://example.org/a.png"}),
        ("image", {"type": "image_url"}),
        (
            "a.pdf, application/pdf",
            {
                "type": "file",
                "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,QQ=="},
            },
        ),
        ("file", {"type": "file", "file": {"filename": "a\nb", "file_id": "f"}}),
        ("input_audio", {"type": "input_audio", "input_audio": {"data": "QQ=="}}),
    ],
)
def test_unreadable_part_of_an_older_message_becomes_one_line(name: str, part: Message) -> None:
    line = f"[{name}, not shown: this model reads text only]"
    old = [user(text("Look."), part, text("And?")), {"role": "assistant", "content": "A."}, GO_ON]
    assert texts(fit_attachments(old, False)) == [f"Look.\n{line}\nAnd?", "A.", "Go on."]
    assert texts(fit_attachments([CALL, result(part)], False)) == ["", line]
    with pytest.raises(
        RequestRefused, match=f"newest message has {name}, expected text: "
    ) as refused:
        fit_attachments([user(text("Look."), part)], False)
    assert refused.value.status == 400


@pytest.mark.parametrize(
    "messages",
    [
        [user(PNG)],
        [GO_ON, {"role": "assistant", "content": "A."}, user(text("Look."), PNG)],
        [user(PNG), {"role": "system", "content": "Be brief."}],
        [GO_ON, user(PNG)],
        [user(PNG, text("Look."))],
        [user(text("Look."), PNG, text("source: ship.png"))],
        [user(PNG, text("Look."), PNG, text("And that?"))],
        [user(text('<image name="[Image #1]">'), PNG, text("</image>"), text("Look."))],
        [user(PNG, text("Look."), text("<system-reminder>\nBe\nbrief.</system-reminder>\n"))],
    ],
)
def test_text_model_refuses_an_image_in_the_newest_question(messages: list[Message]) -> None:
    with pytest.raises(RequestRefused, match="image/png"):
        fit_attachments(messages, False)
    assert fit_attachments(messages, True) == messages


@pytest.mark.parametrize(
    "messages",
    [
        [user(PNG), CALL, result(text("Done."))],
        [user(PNG), GO_ON],
        [GO_ON, CALL, result(PNG)],
        [GO_ON, CALL, result(PNG), result(text("Done."))],
        [GO_ON, CALL, result(text("Read.")), user(PNG)],
        [GO_ON, CALL, result(text("Read.")), user(PNG), user(text("And?"), PNG)],
        [GO_ON, CALL, result(text("Read.")), {"role": "system", "content": "S."}, user(PNG)],
        [user(PNG), {"role": "assistant", "content": "The picture shows"}],
        # Claude Code joins user messages like this after a refusal.
        [user(PNG, text("Look."), text("Sure?"))],
        [user(text("Look."), PNG, text("source: ship.png"), text("Sure?"), text("And now?"))],
    ],
)
def test_text_model_replaces_images_of_history_and_tool_results(messages: list[Message]) -> None:
    sent = copy.deepcopy(messages)
    fitted = fit_attachments(messages, False)
    assert messages == sent
    assert LINE in "".join(texts(fitted)) and "IMAGE" not in "".join(texts(fitted))
    assert fit_attachments(fitted, False) == fitted
    later = fit_attachments([*messages, {"role": "assistant", "content": "A."}, GO_ON], False)
    assert later[: len(fitted)] == fitted


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([result(text("R"), PNG)], ["R", "IMAGE"]),
        ([result(PNG), result(PNG), GO_ON], ["", "", "IMAGEIMAGEGo on."]),
        ([result(PNG), user(text("And?"))], ["", "IMAGEAnd?"]),
        ([result(PNG), {"role": "assistant", "content": "A."}], ["", "IMAGE", "A."]),
        ([result(text("R")), GO_ON], ["R", "Go on."]),
        ([{"role": "tool", "content": "R"}, user(PNG)], ["R", "IMAGE"]),
    ],
)
def test_images_of_tool_results_move_to_a_user_message(
    messages: list[Message], expected: list[str]
) -> None:
    fitted = fit_attachments(messages, True)
    assert texts(fitted) == expected
    assert fit_attachments(fitted, True) == fitted
    roles = [message["role"] for message in fitted if "IMAGE" in texts([message])[0]]
    assert set(roles) <= {"user"}


def test_image_model_replaces_or_refuses_other_files() -> None:
    pdf = {"type": "file", "file": {"file_data": "data:application/pdf;base64,QQ=="}}
    line = "[application/pdf, not shown: this model reads text and images only]"
    assert texts(fit_attachments([CALL, result(pdf, PNG)], True)) == ["", f"{line}\n", "IMAGE"]
    with pytest.raises(RequestRefused, match="application/pdf, expected text or images: "):
        fit_attachments([user(PNG, pdf)], True)


class Template:
    """A tokenizer whose template writes a token for parts of one kind."""

    def __init__(self, kind: str) -> None:
        self._kind = kind

    def apply_chat_template(self, messages: list[Message], tokenize: bool) -> str:
        (part,) = messages[0]["content"]
        if self._kind == "error":
            raise TypeError("can only concatenate str")
        return "<|patch|>" if part["type"] == self._kind else str(part)


@pytest.mark.parametrize(
    ("kind", "reads_images"),
    [("image_url", True), ("image", True), ("text", False), ("error", False)],
)
def test_model_reads_images_only_if_its_template_writes_image_tokens(
    kind: str, reads_images: bool
) -> None:
    processor = SimpleNamespace(image_token="<|patch|>")
    assert renders_images(Template(kind), processor) is reads_images
    assert not renders_images(Template(kind), None)
