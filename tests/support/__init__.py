"""Code that several test folders, the benchmarks and the tools use."""

from .reply import Reply, ServerError, parse_outcome
from .server_process import ServerProcess
from .servers import AT_ONCE, FULL_PRECISION, StartServer
from .stock import heed_biases, keeps_short_chunks, n_not_sent, reads_lists_of_calls, serves_holes
from .synthetic import (
    Message,
    make_tiny_model,
    synthetic_conversation,
    synthetic_text,
)
from .waiting import hold, settle, wait_until, writer_held
from .zoo import make_zoo_model, whole_characters

__all__ = [
    "AT_ONCE",
    "FULL_PRECISION",
    "Message",
    "Reply",
    "ServerError",
    "ServerProcess",
    "StartServer",
    "heed_biases",
    "hold",
    "keeps_short_chunks",
    "make_tiny_model",
    "make_zoo_model",
    "n_not_sent",
    "parse_outcome",
    "reads_lists_of_calls",
    "serves_holes",
    "settle",
    "synthetic_conversation",
    "synthetic_text",
    "wait_until",
    "whole_characters",
    "writer_held",
]
