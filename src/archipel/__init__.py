"""Train one model on an archipelago of machines: islands of fast links, slow water between them."""

__version__ = "0.1.0"

import importlib
from typing import TYPE_CHECKING, Any

from archipel.actor import Actor, Context, Message, MethodConfig, NodeId, World
from archipel.errors import Diverged, Interrupted, TrainingError, UserError
from archipel.train.data import Shard
from archipel.train.task import Schedule, Task, adamw

if TYPE_CHECKING:  # a method or a task does not wait for what draws reports
    from archipel.experiment import Comparison, compare, launch, resume, simulate
    from archipel.grid import Sweep, sweep
    from archipel.report import Result

__all__ = [
    "Actor",
    "Comparison",
    "Context",
    "Diverged",
    "Interrupted",
    "Message",
    "MethodConfig",
    "NodeId",
    "Result",
    "Schedule",
    "Shard",
    "Sweep",
    "Task",
    "TrainingError",
    "UserError",
    "World",
    "__version__",
    "adamw",
    "compare",
    "launch",
    "resume",
    "simulate",
    "sweep",
]


_LATER = {
    "experiment": {"Comparison", "Result", "compare", "launch", "resume", "simulate"},
    "grid": {"Sweep", "sweep"},
}
"""What makes runs, by the file that it is in."""


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    """What makes runs, imported when it is first asked for."""
    for module, names in _LATER.items():
        if name in names:
            return getattr(importlib.import_module(f"archipel.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
