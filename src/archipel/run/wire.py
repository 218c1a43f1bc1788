"""What a message weighs and which vectors it carries, on any clock.

What belongs here: how large something is when it travels, counted the same way by the simulator,
which models the bytes, and by the live engine, which moves them. What does not: how long that takes
(`sim/network.py`), and who carries it (`live/`).

Weights of a model travel as fp32. A weight is a share of the model: 1 is one vector of all the
weights that a node holds. So one number is right for a small model that is timed as a large one,
and for a run in which nothing is trained and all vectors are empty.
"""

from __future__ import annotations

from dataclasses import fields

from torch import Tensor

from archipel.actor import Message, Vector

BYTES_PER_ENTRY = 4
"""Of a vector on its way: fp32."""


def vectors(message: Message) -> list[Tensor]:
    """All tensors among the fields of a message, in the order of its fields."""
    kind = type(message)
    if kind not in _FIELDS:
        _FIELDS[kind] = tuple(part.name for part in fields(message))
    names = _FIELDS[kind]
    return [value for name in names if isinstance(value := getattr(message, name), Tensor)]


def weight(message: Message, numel: int) -> float:
    """What a message weighs, in models.

    A message's own `weight` counts first (see `actor.Message`). Else its tensors are measured,
    where there is a model to measure them by; and counted, one model each, where nothing is
    trained.

    Args:
        message: on its way.
        numel: entries of the whole vector of the node that sends it; 0 where nothing is trained.
    """
    stated = message.weight
    if stated is not None:
        return stated
    if numel:
        return sum(tensor.nbytes for tensor in vectors(message)) / (BYTES_PER_ENTRY * numel)
    return float(len(vectors(message)))


def share(vector: Vector, numel: int) -> float:
    """The part of a node's whole vector, of `numel` entries, that `vector` is; 1 where nothing
    is trained.
    """
    return len(vector) / numel if numel else 1.0


_FIELDS: dict[type[Message], tuple[str, ...]] = {}
"""Names of each kind of message's fields: to ask for them anew is slow."""
