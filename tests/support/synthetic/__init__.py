"""Models with random weights and conversations, for the tests and the benchmarks."""

from .conversation import Message, synthetic_conversation, synthetic_text
from .model import make_tiny_model
from .outliers import add_outliers
from .tokenizer import TokenizerKind, train_tokenizer

__all__ = [
    "Message",
    "TokenizerKind",
    "add_outliers",
    "make_tiny_model",
    "synthetic_conversation",
    "synthetic_text",
    "train_tokenizer",
]
