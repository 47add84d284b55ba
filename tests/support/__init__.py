"""What several test folders use. The server process itself is `mlx_lm_kvpersist.testing`."""

from mlx_lm_kvpersist.synthetic import (
    Message,
    make_tiny_model,
    synthetic_conversation,
    synthetic_text,
)
from mlx_lm_kvpersist.testing import Reply, ServerError, ServerProcess, parse_outcome

from .servers import StartServer
from .stock import keeps_short_chunks
from .waiting import wait_until
from .zoo import make_zoo_model, whole_characters

__all__ = [
    "Message",
    "Reply",
    "ServerError",
    "ServerProcess",
    "StartServer",
    "keeps_short_chunks",
    "make_tiny_model",
    "make_zoo_model",
    "parse_outcome",
    "synthetic_conversation",
    "synthetic_text",
    "wait_until",
    "whole_characters",
]
