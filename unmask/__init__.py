"""unmask: diffusion language models, from a laptop's CPU to a cluster, with the same code and the same numbers."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from unmask.config import Config, ParallelConfig
    from unmask.engine.engine import Engine
    from unmask.errors import UserError
    from unmask.runs.open import open_model as load
    from unmask.sampling import sample, stream
    from unmask.training.callbacks import Callback
    from unmask.training.source import Source
    from unmask.training.trainer import Trainer

# Where torchao is installed transformers imports it, and it would tell at every start which libraries of its own it
# cannot load, for GPUs that are not there.
for _noisy in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_noisy).setLevel(logging.ERROR)

#: name -> where it lives; imported when first asked for, so that `import unmask` costs nothing.
_PUBLIC = {
    "Callback": "unmask.training.callbacks:Callback",
    "Config": "unmask.config:Config",
    "Engine": "unmask.engine.engine:Engine",
    "ParallelConfig": "unmask.config:ParallelConfig",
    "Source": "unmask.training.source:Source",
    "Trainer": "unmask.training.trainer:Trainer",
    "UserError": "unmask.errors:UserError",
    "load": "unmask.runs.open:open_model",
    "sample": "unmask.sampling:sample",
    "stream": "unmask.sampling:stream",
}

__all__ = [
    "Callback",
    "Config",
    "Engine",
    "ParallelConfig",
    "Source",
    "Trainer",
    "UserError",
    "load",
    "sample",
    "stream",
]


def __getattr__(name: str) -> Any:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'unmask' has no attribute {name!r}")
    module, attribute = _PUBLIC[name].split(":")
    return getattr(import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
