"""Changes a conversation into a form that the chat template of its request renders.

Clients send the whole conversation with each request, so a message that the template refuses would
end the conversation for good. Short test conversations show what a template refuses.

A conversation that the template renders stays unchanged, with one exception: a system message that
the template leaves out, moves, or treats as the assistant's. With such a message, the next turn
would change the prompt or be refused.

A message's form must not depend on later turns, so that each turn extends the prompt.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from hashlib import blake2b
from itertools import chain
from typing import Any

from ..apis import joined, readable, text_of, without_null

Message = dict[str, Any]

PLACE = "kvpersist_place"
"""While a message is adapted, this field has the message's index in the client's list."""
NO_RESULT = "[no result: the call was interrupted]"
_MARK = "aa1zz"
_ASKED: Message = {"role": "user", "content": _MARK}
_CALL_IDS = ("call00000", "call00001")
_LOOK = {"name": "look", "description": "Look.", "parameters": {"type": "object"}}
_ENDS: tuple[tuple[str, ...], ...] = ((), ("user",), ("assistant", "user"))
"""Kinds of messages that some templates require after the tested message."""
_JOINS: dict[str, tuple[str, ...]] = {
    "system": ("system", "user", "tool"),
    "user": ("user", "tool"),
    "assistant": ("assistant",),
    "calls": ("assistant",),
    "parallel": ("assistant",),
    "tool": (),
}
"""For each kind of message, the kinds of previous messages to which it can be joined.

A kind is a role, or "calls" or "parallel": an assistant message with one call or several.
"""
_CALLS = ("calls", "parallel")
_TURNS = ("user", "assistant", *_CALLS)
_REASONING = ("reasoning", "reasoning_content", "thinking")
_MOST_TEMPLATES = 32
_MOST_KNOWN = 1000


class Templates:
    """The chat templates of a tokenizer, by the arguments of requests. Any thread."""

    def __init__(self) -> None:
        self._tokenizer: Any = None
        self._known: dict[str, Template] = {}

    def of(self, tokenizer: Any, arguments: dict[str, Any], tools: Any) -> Template:
        """Return the template that a request uses; many templates render differently with tools."""
        if tokenizer is not self._tokenizer or len(self._known) > _MOST_TEMPLATES:
            self._tokenizer, self._known = tokenizer, {}
        key = json.dumps([bool(tools), arguments], sort_keys=True, default=str)
        return self._known.setdefault(key, Template(tokenizer, arguments, has_tools=bool(tools)))


class Template:
    """The chat template of a request, and the known refusals of the template. Any thread."""

    def __init__(self, tokenizer: Any, arguments: dict[str, Any], *, has_tools: bool) -> None:
        self._tokenizer, self._arguments = tokenizer, arguments
        self._tools = [{"type": "function", "function": _LOOK}] if has_tools else None
        self._known: dict[Hashable, int] = {}

    def fit(
        self, messages: list[Message], tools: Any = None, *, continues: bool = False
    ) -> list[Message]:
        """Return the messages in forms that the template renders, as far as possible.

        continues: whether the model continues the last message.
        """
        own, asked = getattr(self._tokenizer, "chat_template", None), self._arguments
        source = asked.get("chat_template") or own
        if isinstance(own, dict):  # by name
            source = self._tokenizer.get_chat_template(asked.get("chat_template"), self._tools)
        cleaned = [without_null(message) for message in messages]
        for message in cleaned:
            if message.get("role") == "developer" and "developer" not in str(source):
                message["role"] = "system"
        fitted = _Fitting(self, cleaned, adapts_all=True).fitted
        if fitted != cleaned:
            least = _Fitting(self, cleaned, adapts_all=False).fitted
            if self.rendered(least, tools, continues=continues) is not None:
                fitted = least
        return fitted

    def refused(self, messages: list[Message], tools: Any, *, continues: bool) -> int | None:
        """Return the `PLACE` of the first message that cannot be rendered, or None.

        messages: the request's messages before `fit`.
        """

        def fails(n: int) -> bool:
            is_end = continues and n == len(messages)
            fitted = self.fit(messages[:n], tools, continues=is_end)
            return self.rendered(fitted, tools, continues=is_end) is None

        if not messages or self.rendered([_ASKED], tools) is None or not fails(len(messages)):
            return None
        n = bisect_left(range(1, len(messages)), True, key=fails)
        return messages[n].get(PLACE)

    def rendered(
        self, messages: Sequence[Message], tools: Any = None, *, continues: bool = False
    ) -> str | None:
        """Return the prompt text of messages; None if it is empty or cannot be rendered."""
        options = {**self._arguments, "tokenize": False, "tools": tools or self._tools}
        if continues:
            options["continue_final_message"] = True
        try:
            prepared = [_as_rendered(message) for message in messages]
            render = self._tokenizer.apply_chat_template
            text = str(render(prepared, add_generation_prompt=not continues, **options))
            text.encode()  # raises for half a surrogate pair: it cannot be tokenized
            return text or None
        except Exception:
            return None

    def fits(self, before: list[str], kind: str) -> bool:
        """Tell whether the template renders `kind` after `before`, or refuses every test."""
        ends, usual, place = _ENDS, before or ["user", "assistant"], None
        if kind == "system":
            # The end shows whether a template that counts messages misreads a system message.
            is_asked = before[-1:] in (["user"], ["tool"])
            ends, place = ((_ENDS[2],) if is_asked else (_ENDS[1],)), len(before)
            usual = ["user"] if is_asked else ["user", "assistant"]
        tried = (self.spoken([*before, kind, *end], place) for end in ends)
        usual_texts = (self.spoken([*usual, *end]) for end in ends)
        return self._first((*before, kind), chain(tried, usual_texts)) < len(ends)

    def reads_calls(self) -> bool:
        return self.fits(["user"], "calls") and self.fits(["user", "calls"], "tool")

    def reads_parallel_calls(self) -> bool:
        return self._reads("parallel calls", self._called(_CALL_IDS), self._called())

    def reads_beside_calls(self, *names: str) -> bool:
        """Tell whether a message with calls may have these fields, such as content."""
        bare = self._calls()
        full = {**bare, **dict.fromkeys(names, _MARK)}
        return self._reads(("beside calls", *names), [full], [bare])

    def id_of(self, call_id: Any, otherwise: Any) -> Any:
        """Return a call's id; if the template refuses it, a new id of nine hexadecimal digits.

        The new id is made from the old id, or from `otherwise` if there is none. Some templates
        require nine characters.
        """
        name = "id", type(call_id), isinstance(call_id, str) and (len(call_id), call_id.isalnum())
        if self._reads(name, self._called([call_id]), self._called()):
            return call_id
        return blake2b(str(call_id or otherwise).encode(), digest_size=8).hexdigest()[:9]

    def wants_names(self) -> bool:
        """Tell whether a tool's result needs the name of its tool."""
        bare, named = (_result(_CALL_IDS[0], name) for name in (None, "look"))
        return not self._reads("names", [self._calls(), bare], [self._calls(), named])

    def form_of(self, arguments: Any) -> Any:
        """Return a call's arguments in the first form that the template renders."""
        is_empty = arguments in ("", None)
        forms = [arguments, json.dumps(arguments, ensure_ascii=False)]
        if not isinstance(arguments, dict):
            forms.insert(1, {} if is_empty else {"arguments": arguments})
        tried = (self.rendered([_ASKED, _calling(form)]) for form in forms)
        return forms[self._first(("arguments", type(arguments), is_empty), tried)]

    def spoken(self, kinds: Sequence[str], place: int | None = None) -> str | None:
        """Return a rendered conversation with these kinds of messages; None if it is refused.

        place: the index of a message whose text must be between the texts of its neighbours.
        """
        marks = [f"{chr(ord('b') + i)}b{i}zz" for i in range(len(kinds))]
        messages = [
            {"role": kind, "content": mark} for kind, mark in zip(kinds, marks, strict=True)
        ]
        for i, kind in enumerate(kinds):
            if kind in _CALLS:
                messages[i] = self._calls(_CALL_IDS[: 1 + (kind == "parallel")])
            elif kind == "tool":
                messages[i] = {**self._called()[1], "content": marks[i]}
        text = self.rendered(messages)
        if not text or place is None:
            return text
        places = [text.find(mark) for mark in marks]
        before = max(places[:place], default=-1)
        after = min((at for at in places[place + 1 :] if at >= 0), default=len(text))
        return text if -1 < places[place] and before < places[place] < after else None

    def _called(self, ids: Sequence[Any] = _CALL_IDS[:1]) -> list[Message]:
        name = "look" if self.wants_names() else None
        return [self._calls(ids), *(_result(call_id, name) for call_id in ids)]

    def _calls(self, ids: Sequence[Any] = _CALL_IDS[:1]) -> Message:
        return _calling(self.form_of({"where": _MARK}), ids)

    def _reads(self, name: Hashable, form: list[Message], usual: list[Message]) -> bool:
        """Tell whether the template renders `form`, or refuses both `form` and `usual`."""
        texts = (self.rendered([_ASKED, *messages]) for messages in (form, usual))
        return self._first(name, texts) == 0

    def _first(self, name: Hashable, texts: Iterable[str | None]) -> int:
        """Return the index of the first rendered text, or 0; remember it by `name`."""
        if name not in self._known:
            readable_at = (i for i, text in enumerate(texts) if text is not None)
            index = next(readable_at, 0)
            if len(self._known) > _MOST_KNOWN:
                self._known.clear()  # clients may send new roles without end
            self._known[name] = index
        return self._known[name]


class _Fitting:
    """Messages, each in a form that the template renders after the previous messages.

    adapts_all: whether all messages are adapted, or only system messages.
    """

    def __init__(self, template: Template, messages: list[Message], *, adapts_all: bool) -> None:
        self._template, self._adapts_all = template, adapts_all
        self.fitted: list[Message] = []
        self._kinds: list[str] = []
        """The kinds of the fitted messages, without repetitions and old turns."""
        self._open: list[dict[str, Any]] = []
        """The fitted calls without a result, since the last question or answer."""
        rest = deque(messages)
        while rest:
            message = rest.popleft()
            for fitted in self._fit(message, rest) if adapts_all else [message]:
                self._place(fitted)
        if adapts_all and messages:
            self._ask()

    def _fit(self, message: Message, rest: deque[Message]) -> Iterator[Message]:
        """Yield a message that the template renders, then its calls' results, taken from `rest`."""
        kind = _kind(message)
        if kind == "function" and not self._template.fits(["user", "assistant"], kind):
            message, kind = {**message, "role": "tool"}, "tool"
        if kind == "tool":
            yield self._fit_result(message, list(self._open))[0]
        elif kind in _CALLS:
            yield from self._fit_calls(message, rest)
        else:
            yield message if message.get("tool_calls", True) else without(message, "tool_calls")

    def _fit_calls(self, message: Message, rest: deque[Message]) -> Iterator[Message]:
        template, content, place = self._template, message.get("content"), message.get(PLACE)
        calls = [
            _fit_call(template, call, f"{place}.{i}")
            for i, call in enumerate(message["tool_calls"])
        ]
        unanswered, answered = list(calls), []
        while rest and _kind(rest[0]) == "tool":
            answered.append(self._fit_result(rest.popleft(), unanswered))
        answered.sort(key=lambda pair: pair[1] is None)  # a call's second result comes last
        message = {**message, "tool_calls": calls}
        are_read = template.reads_calls()
        if not are_read:
            content = joined(content, "\n".join(map(_as_text, calls)))
            message = {**without(message, "tool_calls"), "content": content}
        elif content:
            thoughts = next((message[name] for name in _REASONING if message.get(name)), None)
            if thoughts and not template.reads_beside_calls("content", *_REASONING[:2]):
                content = joined(thoughts, content)
                message = {**without(message, *_REASONING), "content": content}
            if not template.reads_beside_calls("content"):
                yield without(message, "tool_calls")
                message = {**without(message, *_REASONING), "content": ""}
        if len(calls) < 2 or not are_read or template.reads_parallel_calls():
            yield message
            yield from (result for result, _ in answered)
            return
        # Each call becomes a separate message, before its result.
        for result, call in [*answered, *((None, call) for call in unanswered)]:
            if call is not None:
                yield {**message, "tool_calls": [call]}
                message = {**without(message, *_REASONING), "content": ""}
            if result is not None:
                yield result

    def _fit_result(
        self, message: Message, calls: list[dict[str, Any]]
    ) -> tuple[Message, dict[str, Any] | None]:
        """Return a tool's result with its call's id, and the call, if known.

        calls: the calls without a result. The returned call is removed from this list.
        """
        call_id, template = message.get("tool_call_id"), self._template
        if call_id:
            call_id = template.id_of(call_id, "")
        elif calls:
            call_id = calls[0].get("id")
        call_id = call_id or template.id_of(call_id, message.get(PLACE))
        own = next((call for call in calls if call.get("id") == call_id), None)
        if own is not None:
            calls.remove(own)
        message = {**message, "tool_call_id": call_id} if call_id else message
        if not message.get("name") and template.wants_names():
            message = {**message, "name": str(own["function"].get("name")) if own else ""}
        return message, own

    def _place(self, message: Message) -> None:
        kind, before = _kind(message), self._kinds[-1] if self._kinds else ""
        if self._may_follow(kind):
            self._append(message, kind)
            return
        if kind == "system" and before not in ("", "system"):
            message = {**message, "content": _enclosed("system-reminder", message)}
        if kind == "tool":
            message = {**message, "content": _enclosed("tool_response", message)}
        if self._open and kind in _TURNS:
            for call in list(self._open):
                name = call["function"].get("name") if self._template.wants_names() else None
                self._append({**_result(call.get("id"), name), PLACE: message.get(PLACE)}, "tool")
            self._open = []
            self._place(message)
        elif before in _JOINS.get(kind, ()):
            self._join(message, kind)
        elif kind not in _TURNS:
            self._place({**message, "role": "user"})
        else:
            if kind != "user" and self._template.fits([*self._kinds, "user"], kind):
                self._append(_question(message), "user")
            self._append(message, kind)

    def _may_follow(self, kind: str) -> bool:
        template = self._template
        if not self._adapts_all and kind != "system":
            return True
        if kind == "tool" and not template.reads_calls():
            return False
        if kind not in _JOINS and not template.fits(["user", "assistant"], kind):
            return False  # a template that counts messages accepts any role as a reply
        return template.fits(self._kinds, kind)

    def _append(self, message: Message, kind: str) -> None:
        self.fitted.append(message)
        kinds = self._kinds
        if kind in _CALLS:
            self._open = [*self._open, *message["tool_calls"]]
        elif kind in ("user", "assistant"):
            self._open = []
        elif kind == "tool" and self._open:
            ids, own = [call.get("id") for call in self._open], message.get("tool_call_id")
            self._open.pop(ids.index(own) if own in ids else 0)
            if self._open and kinds[-1] == "tool":
                return  # `kinds` already ends with a result
        if kind == "assistant" and "user" in kinds:
            kinds[:] = ["user", kind]
            return
        kinds.append(kind)
        if kinds[-3:] == [kind] * 3:
            kinds.pop()
        elif len(kinds) >= 4 and kinds[-2:] == kinds[-4:-2]:
            del kinds[-2:]

    def _join(self, message: Message, kind: str) -> None:
        last = self.fitted[-1]
        names = [name for name in ("content", *_REASONING) if name in last or name in message]
        merged = {name: joined(last.get(name), message.get(name)) for name in names}
        if kind in _CALLS:
            merged["tool_calls"], self._kinds[-1] = message["tool_calls"], kind
            self._open = list(message["tool_calls"])
        self.fitted[-1] = {**last, **merged}

    def _ask(self) -> None:
        """Put an empty question after the first system messages if the template requires it."""
        roles, kinds = [message.get("role") for message in self.fitted], self._kinds
        n = next((i for i, kind in enumerate(kinds) if kind != "system"), len(kinds))
        spoken = self._template.spoken
        if "user" in roles or spoken(kinds, 0 if n else None) is not None:
            return
        if spoken([*kinds[:n], "user", *kinds[n:]]) is not None:
            place = next((i for i, role in enumerate(roles) if role != "system"), len(roles))
            self.fitted.insert(place, _question(self.fitted[0]))


def _fit_call(template: Template, call: dict[str, Any], usual_id: str) -> dict[str, Any]:
    """Return a call whose id and arguments the template renders. mlx-lm reads arguments as JSON."""
    function = {"arguments": {}, **call["function"]}
    arguments = parsed = function["arguments"]
    if (call_id := template.id_of(call.get("id"), usual_id)) != call.get("id"):
        call = {**call, "id": call_id}
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # arguments that were cut off stay text
            parsed = json.loads(arguments)
    form = template.form_of(readable(parsed))
    if form is parsed and parsed is not arguments:
        return call
    return {**call, "function": {**function, "arguments": json.dumps(form, ensure_ascii=False)}}


def _kind(message: Message) -> str:
    calls = message.get("tool_calls") if message.get("role") == "assistant" else None
    are_calls = isinstance(calls, list) and all(
        isinstance(call, dict) and isinstance(call.get("function"), dict) for call in calls
    )
    if not calls or not are_calls:
        return str(message.get("role"))
    return "calls" if len(calls) == 1 else "parallel"


def _as_rendered(message: Message) -> Message:
    """Return a message as mlx-lm gives it to the template."""
    rendered = {**message, "content": text_of(message.get("content"))}
    if _kind(message) in _CALLS:
        rendered["tool_calls"] = calls = [dict(call) for call in message["tool_calls"]]
        for call in calls:
            if isinstance(arguments := call["function"].get("arguments"), str) and arguments:
                call["function"] = {**call["function"], "arguments": json.loads(arguments)}
    return rendered


def _enclosed(tag: str, message: Message) -> Any:
    """Return a message's content between tags: Claude Code's for reminders, Qwen's for results."""
    return joined(joined(f"<{tag}>\n", message.get("content"), ""), f"\n</{tag}>", "")


def _as_text(call: dict[str, Any]) -> str:
    """Return a call as text, in the form in which most models write calls."""
    function = call["function"]
    shown = {"name": function.get("name"), "arguments": json.loads(function["arguments"]) or {}}
    return f"<tool_call>\n{json.dumps(shown, ensure_ascii=False)}\n</tool_call>"


def _calling(arguments: Any, ids: Sequence[Any] = _CALL_IDS[:1]) -> Message:
    """Return a message with a call for each id. An id of None is left out."""
    function = {"name": "look", "arguments": json.dumps(arguments)}
    call = {"type": "function", "function": function}
    calls = [call if call_id is None else {**call, "id": call_id} for call_id in ids]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _result(call_id: Any, name: str | None) -> Message:
    fields = {"role": "tool", "content": NO_RESULT, "tool_call_id": call_id, "name": name}
    return without_null(fields)


def _question(message: Message) -> Message:
    return {"role": "user", "content": "", PLACE: message.get(PLACE)}


def without(message: Message, *names: str) -> Message:
    return {name: value for name, value in message.items() if name not in names}
