"""The log-probabilities of the tokens of replies, computed before the next step.

After each step, mlx-lm's server reads the log-probability of each token. If the server computed it
then, it would wait for the next step, which has been submitted already, and the device would be
idle while Python builds the step after that.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from ..manager import TakenTokens


class TokenLogprobs:
    """The log-probabilities of a response: `row`, [V], of all tokens; `value`, [], of its token."""

    def __init__(self, row: mx.array, token: int, value: mx.array) -> None:
        self._row, self._token, self._value = row, token, value

    def __getitem__(self, index: Any) -> mx.array:
        is_own = isinstance(index, int) and index == self._token
        return self._value if is_own else self._row[index]

    def __neg__(self) -> mx.array:
        return -self._row

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # a copy has no `_row` yet
            raise AttributeError(name)
        return getattr(self._row, name)


def next_logprobs(batch: Any) -> dict[int, mx.array]:
    """Submit the log-probabilities of the next tokens of a `GenerationBatch`; return them by uid.

    Only replies of requests that a plugin took have a value, [].
    """
    rows = enumerate(zip(batch.uids, batch.tokens, batch._next_logprobs, strict=True))
    values = {
        uid: mx.take(logprobs, batch._next_tokens[place])
        for place, (uid, tokens, logprobs) in rows
        if isinstance(tokens, TakenTokens)
    }
    if values:
        mx.async_eval(list(values.values()))  # type: ignore[no-untyped-call]
    return values


def set_logprobs(responses: list[Any], values: dict[int, mx.array]) -> None:
    """Give the first response of each reply the value that `next_logprobs` returned for it."""
    for response in responses:
        if (value := values.pop(response.uid, None)) is not None:
            response.logprobs = TokenLogprobs(response.logprobs, response.token, value)
