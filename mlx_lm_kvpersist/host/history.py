"""A conversation in a form that the chat template of its request renders.

Clients send the whole conversation with each request, so a message that the template refuses would
end the conversation for good. Each kind of refusal is found alone, with a short conversation, when
it first matters. A conversation that the template renders is left unchanged, with one exception: a
system message that the template leaves out or moves is adapted, since moving it changes the prompt.

An adaptation depends on the messages up to its own, so the prompts of a conversation only grow.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from hashlib import blake2b
from typing import Any

from ..contents import joined, parts_of, readable, text_of

Message = dict[str, Any]

PLACE = "kvpersist_place"
"""The field with a message's index in the client's list, while the message is adapted."""
NO_RESULT = "[no result: the call was interrupted]"
_MARK = "aa1zz"
_CALL_ID = "call00000"
_LOOK: dict[str, Any] = {"name": "look", "description": "Look.", "parameters": {}}
_TOOL = {"type": "function", "function": {**_LOOK, "parameters": {"type": "object"}}}
_ENDS = ((), ("user",), ("assistant", "user"))
"""Ends of a conversation, behind the message that is tried: a template can ask for them."""
_KINDS = ("system", "user", "assistant", "calls", "tool")
_JOINS = {
    "system": ("system", "user", "tool"),
    "user": ("user", "tool"),
    "assistant": ("assistant",),
    "calls": ("assistant",),
}
"""Kinds of messages that a message can become a part of, by its own kind."""
_REASONING = ("reasoning", "reasoning_content", "thinking")
_MOST_TEMPLATES = 32
_MOST_KNOWN = 1000


class Templates:
    """The chat templates of a tokenizer, by the arguments that requests give them. Any thread."""

    def __init__(self) -> None:
        self._tokenizer: Any = None
        self._known: dict[str, Template] = {}

    def of(self, tokenizer: Any, arguments: dict[str, Any], tools: Any) -> Template:
        """Return the template that a request uses; with tools, many have another form."""
        if tokenizer is not self._tokenizer or len(self._known) > _MOST_TEMPLATES:
            self._tokenizer, self._known = tokenizer, {}
        key = json.dumps([bool(tools), arguments], sort_keys=True, default=str)
        return self._known.setdefault(key, Template(tokenizer, arguments, has_tools=bool(tools)))


class Template:
    """The chat template of a request, and what is known of its refusals. Any thread."""

    def __init__(self, tokenizer: Any, arguments: dict[str, Any], *, has_tools: bool) -> None:
        self._tokenizer, self._arguments = tokenizer, arguments
        self._tools = [_TOOL] if has_tools else None
        self._known: dict[Hashable, Any] = {}

    def fit(
        self, messages: list[Message], tools: Any = None, *, continues: bool = False
    ) -> list[Message]:
        """Return messages that the template renders, as far as that is possible.

        tools: the request's. continues: the model continues the last message.
        """
        source = getattr(self._tokenizer, "chat_template", None)
        knows_developer = "developer" in str(self._arguments.get("chat_template") or source)
        cleaned = [_cleaned(message, knows_developer) for message in messages]
        fitted = _Fitting(self, cleaned, adapts_all=True).fitted
        if fitted != cleaned:
            least = _Fitting(self, cleaned, adapts_all=False).fitted
            if self.rendered(least, tools, continues=continues) is not None:
                fitted = least
        return fitted

    def refused(self, messages: list[Message], tools: Any, *, continues: bool) -> int | None:
        """Return the `PLACE` of the first message that cannot be rendered; None: no message is why.

        messages: before they were fitted.
        """

        def fails(n: int) -> bool:
            is_end = continues and n == len(messages)
            fitted = self.fit(messages[:n], tools, continues=is_end)
            return self.rendered(fitted, tools, continues=is_end) is None

        usual = [{"role": "user", "content": _MARK}]
        if not messages or self.rendered(usual, tools) is None or not fails(len(messages)):
            return None
        n = bisect_left(range(1, len(messages)), True, key=fails)
        return messages[n].get(PLACE)

    def rendered(
        self, messages: Sequence[Message], tools: Any = None, *, continues: bool = False
    ) -> str | None:
        """Return the text of messages as the server has it rendered, None if that fails."""
        given = {**self._arguments, "tokenize": False, "tools": tools or self._tools}
        if continues:
            given["continue_final_message"] = True
        try:
            made = [_as_rendered(message) for message in messages]
            render = self._tokenizer.apply_chat_template
            return str(render(made, add_generation_prompt=not continues, **given)) or None
        except Exception:
            return None

    # Refusals.

    def fits(self, before: Sequence[str], kind: str) -> bool:
        """Tell whether the template takes a kind of message here, and a system message in place."""
        # A template that counts messages takes a system message for the assistant's.
        answered = tuple(before[-1:]) in (("user",), ("tool",))
        ends = (_ENDS[1 + answered],) if kind == "system" else _ENDS

        def find() -> bool:
            for end in ends:
                text = self.rendered(self.spoken([*before, kind, *end]))
                if text is not None and (kind != "system" or _is_in_place(text, len(before))):
                    return True
            usual = before or ("user", "assistant")
            return all(self.rendered(self.spoken([*usual, *end])) is None for end in ends)

        return bool(self._know((*before, kind), find))

    def reads_calls(self) -> bool:
        """Tell whether the template takes calls, and their results."""
        return self.fits(["user"], "calls") and self.fits(["user", "calls"], "tool")

    def reads(self, name: Hashable, *messages: Message) -> bool:
        """Tell whether the template takes messages after a question, all else in them being usual.

        name: by which the answer is known.
        """
        asked = {"role": "user", "content": _MARK}
        return bool(self._know(name, lambda: self.rendered([asked, *messages]) is not None))

    def reads_id(self, call_id: Any) -> bool:
        """Tell whether a call may have an id of this type and length."""
        name = "id", type(call_id), isinstance(call_id, str) and (len(call_id), call_id.isalnum())
        return self.reads(name, *self.called(call_id)) or not self.reads("call", *self.called())

    def wants_names(self) -> bool:
        """Tell whether a tool's result needs the name of its tool."""
        called, result = self._calls(_CALL_ID), {"role": "tool", "content": _MARK}
        result["tool_call_id"] = _CALL_ID
        named = self.reads("named", called, {**result, "name": "look"})
        return named and not self.reads("nameless", called, result)

    def form_of(self, arguments: Any) -> Any:
        """Return a call's arguments in the first form that the template renders."""
        forms = _forms(arguments)

        def find() -> int:
            asked = {"role": "user", "content": _MARK}
            texts = (self.rendered([asked, _calling(form)]) for form in forms)
            return next((i for i, text in enumerate(texts) if text is not None), 0)

        is_empty = arguments in ("", None)
        return forms[self._know(("arguments", type(arguments), is_empty), find)]

    def called(self, *ids: Any) -> list[Message]:
        """Return a message with calls, and their results."""
        ids = ids or (_CALL_ID,)
        results = [_result(call_id, "look" if self.wants_names() else None) for call_id in ids]
        return [self._calls(*ids), *results]

    def spoken(self, kinds: Sequence[str]) -> list[Message]:
        """Return a message of each kind, with a text of its own."""
        made = [{"role": kind, "content": _mark(i)} for i, kind in enumerate(kinds)]
        for i, kind in enumerate(kinds):
            if kind == "calls":
                made[i] = self._calls(_CALL_ID)
            elif kind == "tool":
                made[i] = {**self.called()[1], "content": _mark(i)}
        return made

    def _calls(self, *ids: Any) -> Message:
        return _calling(self.form_of({"where": _MARK}), *ids)

    def _know(self, name: Hashable, find: Callable[[], Any]) -> Any:
        if name not in self._known:
            if len(self._known) > _MOST_KNOWN:
                self._known.clear()  # clients send any role
            self._known[name] = find()
        return self._known[name]


class _Fitting:
    """Messages, each in a form in which the template renders it after those before.

    adapts_all: if not, only system messages are adapted.
    """

    def __init__(self, template: Template, messages: list[Message], *, adapts_all: bool) -> None:
        self._template, self._adapts_all = template, adapts_all
        self.fitted: list[Message] = []
        self._kinds: list[str] = []
        """The kinds of the fitted messages since the last answer; repetitions are left out."""
        self._open: list[Any] = []
        """The calls of this turn that have no result yet."""
        self._unsaid: list[Any] = []
        """Those of them that are not among the fitted messages: each goes before its result."""
        self._caller: Message = {}
        for message in messages:
            self._place(message) if not adapts_all else self._fit(message)
        self._say(self._unsaid)
        roles = [message.get("role") for message in self.fitted]
        if adapts_all and roles and "user" not in roles:
            self._ask()

    def _fit(self, message: Message) -> None:
        kind, template = _kind(message), self._template
        if kind == "function" and not template.fits(["user", "assistant"], kind):
            message, kind = {**message, "role": "tool"}, "tool"
        if kind == "tool":
            message = self._fit_result(message)
        else:
            self._say(self._unsaid)
        if kind == "calls":
            message = self._fit_calls(message)
        elif message.get("tool_calls", 0) == []:
            empty = {"role": "assistant", "content": _MARK, "tool_calls": []}
            if not template.reads("no calls", empty, {"role": "user", "content": _MARK}):
                message = without(message, "tool_calls")
        if kind != "calls" or not self._unsaid:
            self._place(message)

    # Calls and their results.

    def _fit_calls(self, message: Message) -> Message:
        template = self._template
        calls = [
            _fit_call(template, call, f"{message.get(PLACE)}.{i}")
            for i, call in enumerate(message["tool_calls"])
        ]
        content, thoughts = message.get("content"), _thoughts(message)
        message, self._open = {**message, "tool_calls": calls}, list(calls)
        if not template.reads_calls():
            content = joined(content, "\n".join(map(_as_text, calls)))
            message = {**without(message, "tool_calls"), "content": content}
        elif content and thoughts:
            made, _ = template.called()
            both = {**made, "content": _MARK, **dict.fromkeys(_REASONING[:2], _MARK)}
            if template.reads("call", *template.called()) and not template.reads("thoughts", both):
                message = {**without(message, *_REASONING), "content": joined(thoughts, content)}
        if len(calls) > 1 and "tool_calls" in message:
            if not template.reads("calls", *template.called(_CALL_ID, "call00001")):
                self._unsaid, self._caller = list(calls), message
        return message

    def _say(self, calls: list[Any]) -> None:
        """Add a message for each of some calls that wait for their result."""
        for call in list(calls):
            self._unsaid.remove(call)
            self._place({**self._caller, "tool_calls": [call]})
            self._caller = {**without(self._caller, *_REASONING), "content": ""}

    def _fit_result(self, message: Message) -> Message:
        call_id, template = message.get("tool_call_id"), self._template
        if call_id and not template.reads_id(call_id):
            call_id = _made_id(call_id)
        if not call_id and self._open:
            call_id = self._open[0].get("id")
        if not call_id and not template.reads_id(call_id):
            call_id = _made_id(message.get(PLACE))
        own = [call for call in self._open if call.get("id") == call_id][:1]
        self._open = [call for call in self._open if call not in own]
        self._say([call for call in own if call in self._unsaid])
        message = {**message, "tool_call_id": call_id} if call_id else message
        if not message.get("name") and template.wants_names():
            names = [call["function"].get("name") for call in own]
            message = {**message, "name": str(*names[:1])}
        return message

    # Roles.

    def _place(self, message: Message) -> None:
        """Add a message in a role in which it may stand there."""
        kind, before = _kind(message), self._kinds[-1] if self._kinds else ""
        if self._is_left(message, kind):
            self._append(message, kind)
            return
        if kind == "system" and before not in ("", "system"):
            message = {**message, "content": _enclosed("system-reminder", message)}
        if kind == "tool":
            message = {**message, "content": _enclosed("tool_response", message)}
        if before in _JOINS.get(kind, ()):
            self._join(message, kind)
        elif kind not in ("user", "assistant", "calls"):
            self._place({**message, "role": "user"})
        elif before == "calls":
            for call in self.fitted[-1]["tool_calls"]:
                name = call["function"].get("name") if self._template.wants_names() else None
                self._append({**_result(call.get("id"), name), PLACE: message.get(PLACE)}, "tool")
            self._open = []
            self._place(message)
        else:
            if kind != "user" and before in ("", "system"):
                self._append(_question(message), "user")
            self._append(message, kind)

    def _is_left(self, message: Message, kind: str) -> bool:
        """Tell whether a message can stay in its role."""
        template = self._template
        if (not self._adapts_all and kind != "system") or not isinstance(message.get("role"), str):
            return True
        if kind == "tool" and not template.reads_calls():
            return False
        if kind not in _KINDS and not template.fits(["user", "assistant"], kind):
            return False  # a template that counts messages may take any role as the second
        return template.fits(self._kinds, kind)

    def _append(self, message: Message, kind: str) -> None:
        self.fitted.append(message)
        kinds = self._kinds
        if kind == "assistant" and "user" in kinds:
            kinds[:] = ["user", kind]
            return
        kinds.append(kind)
        if kinds[-3:] == [kind] * 3:
            kinds.pop()
        elif len(kinds) >= 4 and kinds[-2:] == kinds[-4:-2]:
            del kinds[-2:]

    def _join(self, message: Message, kind: str) -> None:
        """Make a message a part of the one before it."""
        last = self.fitted[-1]
        names = [name for name in ("content", *_REASONING) if name in last or name in message]
        both = {name: joined(last.get(name), message.get(name)) for name in names}
        if kind == "calls":
            both["tool_calls"], self._kinds[-1] = message["tool_calls"], kind
        self.fitted[-1] = {**last, **both}

    def _ask(self) -> None:
        """Put an empty question behind the first system messages, if the template wants any."""
        template, kinds = self._template, self._kinds
        n = next((i for i, kind in enumerate(kinds) if kind != "system"), len(kinds))
        text = template.rendered(template.spoken(kinds))
        asked = template.spoken([*kinds[:n], "user", *kinds[n:]])
        is_read = text is not None and (not n or _mark(0) in text)
        if not is_read and template.rendered(asked) is not None:
            roles = [message.get("role") for message in self.fitted]
            place = next((i for i, role in enumerate(roles) if role != "system"), len(roles))
            self.fitted.insert(place, _question(self.fitted[0]))


def _fit_call(template: Template, call: dict[str, Any], usual_id: str) -> dict[str, Any]:
    """Return a call whose id and arguments the template renders. Stock reads arguments as JSON."""
    function = {"arguments": {}, **call["function"]}
    given = function["arguments"]
    if not template.reads_id(call.get("id")):
        call = {**call, "id": _made_id(call.get("id") or usual_id)}
    value, is_json = given, True
    if isinstance(given, str) and given:
        try:
            value = json.loads(given)
        except (ValueError, RecursionError):
            is_json = False  # perhaps it was cut off: it is read as a text
    form = template.form_of(value)
    if form is value and is_json and isinstance(given, str | None):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(form, ensure_ascii=False)}}


def _cleaned(message: Message, knows_developer: bool) -> Message:
    """Return a message without fields of null, which transformers drops, too.

    A developer's message is a system message, unless the template knows developers. Half a
    surrogate pair can stand in the JSON of a call's arguments.
    """
    message = {name: message[name] for name in message if message[name] is not None}
    if message.get("role") == "developer" and not knows_developer:
        message["role"] = "system"
    if _kind(message) == "calls":
        message["tool_calls"] = [
            {**call, "function": _cleaned_function(call["function"])}
            for call in message["tool_calls"]
        ]
    return message


def _cleaned_function(function: dict[str, Any]) -> dict[str, Any]:
    given = function.get("arguments")
    if isinstance(given, str) and "\\ud" in given.lower():
        try:
            function = {**function, "arguments": json.dumps(readable(json.loads(given)))}
        except (ValueError, RecursionError):
            pass  # without JSON there are no escapes
    return function


def _kind(message: Message) -> str:
    """Return a message's role, or "calls" for the assistant's message with calls of functions."""
    calls = message.get("tool_calls") if message.get("role") == "assistant" else None
    are_calls = isinstance(calls, list) and all(
        isinstance(call, dict) and isinstance(call.get("function"), dict) for call in calls
    )
    return "calls" if calls and are_calls else str(message.get("role"))


def _as_rendered(message: Message) -> Message:
    """Return a message as stock gives it to the template."""
    made = {**message, "content": text_of(message.get("content"))}
    if _kind(message) == "calls":
        made["tool_calls"] = calls = [dict(call) for call in message["tool_calls"]]
        for call in calls:
            if isinstance(given := call["function"].get("arguments"), str) and given:
                call["function"] = {**call["function"], "arguments": json.loads(given)}
    return made


def _enclosed(tag: str, message: Message) -> Any:
    """Return a message's content between tags: Claude Code's for reminders, Qwen's for results."""
    content, start, end = message.get("content"), f"<{tag}>\n", f"\n</{tag}>"
    if isinstance(content, list):
        return [*parts_of(start), *content, *parts_of(end)]
    return f"{start}{content or ''}{end}"


def _as_text(call: dict[str, Any]) -> str:
    """Return a call as text, in the form in which most models write calls."""
    name, given = (call["function"].get(field) for field in ("name", "arguments"))
    arguments = json.loads(given) if isinstance(given, str) and given else given or {}
    made = {"name": name, "arguments": arguments}
    return f"<tool_call>\n{json.dumps(made, ensure_ascii=False)}\n</tool_call>"


def _forms(arguments: Any) -> list[Any]:
    """Return forms of a call's arguments, the best first: unchanged, an object, a text."""
    text = json.dumps(arguments, ensure_ascii=False)
    if isinstance(arguments, dict):
        return [arguments, text]
    return [arguments, {} if arguments in ("", None) else {"arguments": arguments}, text]


def _calling(arguments: Any, *ids: Any) -> Message:
    function = {"name": "look", "arguments": json.dumps(arguments)}
    calls = [{"type": "function", "function": function} for _ in ids or (_CALL_ID,)]
    for call, call_id in zip(calls, ids or (_CALL_ID,), strict=True):
        call |= {} if call_id is None else {"id": call_id}
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _result(call_id: Any, name: str | None) -> Message:
    """Return the result of a call that has none."""
    fields = {"tool_call_id": call_id, "name": name}
    known = {field: value for field, value in fields.items() if value is not None}
    return {"role": "tool", "content": NO_RESULT, **known}


def _made_id(call_id: Any) -> str:
    """Return the id of nine letters and digits that stands for another; the same each time."""
    return blake2b(str(call_id).encode(), digest_size=8).hexdigest()[:9]


def _question(message: Message) -> Message:
    return {"role": "user", "content": "", PLACE: message.get(PLACE)}


def _thoughts(message: Message) -> Any:
    return next((message[name] for name in _REASONING if message.get(name)), None)


def without(message: Message, *names: str) -> Message:
    return {name: value for name, value in message.items() if name not in names}


def _mark(i: int) -> str:
    return f"{chr(ord('b') + i)}b{i}zz"


def _is_in_place(text: str, place: int) -> bool:
    """Tell whether a message's text stands between the texts of those around it, if these do."""
    at, others = text.find(_mark(place)), [text.find(_mark(i)) for i in range(place + 3)]
    before = max(others[:place], default=-1)
    after = [other for other in others[place + 1 :] if other >= 0]
    return at >= 0 and before < at < min(after, default=len(text))
