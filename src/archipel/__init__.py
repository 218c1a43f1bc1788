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
    from archipel.finished import Score, evaluate, generate
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
    "Score",
    "Shard",
    "Sweep",
    "Task",
    "TrainingError",
    "UserError",
    "World",
    "__version__",
    "adamw",
    "compare",
    "evaluate",
    "generate",
    "launch",
    "resume",
    "simulate",
    "sweep",
]


_LATER = {
    **dict.fromkeys(
        ("Comparison", "Result", "compare", "launch", "resume", "simulate"), "archipel.experiment"
    ),
    **dict.fromkeys(("Sweep", "sweep"), "archipel.grid"),
    **dict.fromkeys(("Score", "evaluate", "generate"), "archipel.finished"),
}
"""Which module has what is imported when it is first asked for."""


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name]), name)
