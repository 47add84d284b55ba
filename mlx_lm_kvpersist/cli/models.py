"""Load the model that a command names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mlx_lm.utils import load

from ..errors import ConfigError, KVPersistError


def load_named(name: str, adapter_path: str | None = None) -> tuple[Any, Any]:
    """Return the model and the tokenizer of a folder, or of a name on the hub.

    Raises:
        ConfigError: the folder does not exist.
        KVPersistError: the model cannot be loaded.
    """
    if name.startswith(("/", ".")) and not Path(name).is_dir():
        raise ConfigError(f"there is no model folder {name}")
    try:
        loaded: Any = load(name, adapter_path=adapter_path)
    except Exception as error:
        # The hub, tokenizers and damaged files raise exceptions of many classes.
        reason = " ".join(str(error).split())[:300] or repr(error)
        raise KVPersistError(f"the model {name} cannot be loaded: {reason}") from error
    return loaded[0], loaded[1]
