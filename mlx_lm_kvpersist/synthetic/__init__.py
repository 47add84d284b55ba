"""Models with random weights and conversations, for the demo, the tests and the benchmarks."""

from .conversation import Message, synthetic_conversation, synthetic_text
from .model import TinyModelShape, make_tiny_model
from .shapes import MODEL_SHAPES, TINY, make_shaped_model, shaped_architecture
from .tokenizer import TokenizerKind, train_tokenizer

__all__ = [
    "MODEL_SHAPES",
    "TINY",
    "Message",
    "TinyModelShape",
    "TokenizerKind",
    "make_shaped_model",
    "make_tiny_model",
    "shaped_architecture",
    "synthetic_conversation",
    "synthetic_text",
    "train_tokenizer",
]
