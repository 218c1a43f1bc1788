"""Train one model on an archipelago of machines: islands of fast links, slow water between them."""

__version__ = "0.1.0"

from archipel.actor import Actor, Context, Message, MethodConfig, NodeId, World
from archipel.errors import Diverged, TrainingError, UserError
from archipel.train.data import Shard
from archipel.train.task import Schedule, Task, adamw

__all__ = [
    "Actor",
    "Context",
    "Diverged",
    "Message",
    "MethodConfig",
    "NodeId",
    "Schedule",
    "Shard",
    "Task",
    "TrainingError",
    "UserError",
    "World",
    "__version__",
    "adamw",
]
