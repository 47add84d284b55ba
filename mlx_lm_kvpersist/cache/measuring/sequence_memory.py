"""An upper bound on the memory of a batch's sequences and of one step, from the arrays' shapes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..geometry.spec import ModelCacheSpec, state_arrays, token_arrays
from ..live.packed import GRID
from .prefill_memory import CHECKPOINT_EVERY, MIN_CHUNK, PrefillMemory


@dataclass(frozen=True)
class SequenceMemory:
    """Bytes by the shapes of a model's arrays: of one token, and of a row without its tokens.

    `windows` has the tokens of each window, and the bytes of a token in all layers with it.
    """

    token_bytes: int = 0
    row_bytes: int = 0
    windows: tuple[tuple[int, int], ...] = ()
    n_layers: int = 1
    n_arrays: int = 1
    """Arrays of a block, or of a checkpoint."""
    prefill: PrefillMemory | None = None

    @classmethod
    def of(cls, spec: ModelCacheSpec, prefill: PrefillMemory | None) -> SequenceMemory:
        windows = (
            (window, sum(group.bytes_per_token for group in groups))
            for window, groups in spec.sliding.items()
        )
        states = sum(group.state_bytes for group in spec.recurrent)
        n_arrays = len(list(token_arrays(spec.groups, 1))) + len(list(state_arrays(spec.groups)))
        return cls(
            spec.bytes_per_token,
            states + GRID * spec.newest_bytes,
            tuple(windows),
            max(1, len(spec.template)),
            max(1, n_arrays),
            prefill,
        )

    def with_draft(self, draft: SequenceMemory) -> SequenceMemory:
        """Return the memory of sequences that also have the caches of a draft model."""
        return replace(
            self,
            token_bytes=self.token_bytes + draft.token_bytes,
            row_bytes=self.row_bytes + draft.row_bytes,
            n_arrays=max(self.n_arrays, draft.n_arrays),
        )

    @property
    def chunk_bytes(self) -> int:
        """The memory limit of a chunk of a prompt."""
        return self.prefill.limit_bytes if self.prefill is not None else 0

    def caches_bytes(self, replies: Sequence[int], prompts: Sequence[int], room: int) -> int:
        """Return the most bytes of the caches of sequences with the given lengths, in one batch.

        All rows of a batch are as long as the longest. `room`: tokens that each has beyond its end.
        """
        n_rows = len(replies) + len(prompts)
        if not n_rows:
            return 0
        width = max(*replies, *prompts, 0) + room
        windows = sum(
            n * (n_rows * min(window, width) + len(prompts) * min(CHECKPOINT_EVERY, width))
            for window, n in self.windows
        )
        return n_rows * (width * self.token_bytes + self.row_bytes) + windows

    def step_bytes(self, replies: Sequence[int], prompts: Sequence[int], room: int) -> int:
        """Return the most bytes of a chunk, or a step of the replies, without the caches."""
        if self.prefill is None:
            return 0
        n_rows, longest = len(replies) + len(prompts), max(*replies, *prompts, 0, 0)
        shortest = self.prefill.peak_bytes(MIN_CHUNK, longest) if prompts else 0
        # When rows come or go the batch is copied, one layer after the other.
        layers = 2 * self.caches_bytes(replies, prompts, room) // self.n_layers
        dequantized = int(n_rows * longest * self.prefill.key_bytes)
        return max(self.chunk_bytes, shortest, dequantized, layers)
