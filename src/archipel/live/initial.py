"""An actor on its way to its host, without the initial weights: the host makes them itself.

What belongs here: packing and unpacking an actor, and making the initial weights from the run's
seed. What does not: what a host does with its actor (`host.py`), and sending weights to a host that
makes others (`ray_host.py`).

A fresh actor is little more than copies of the initial weights and vectors of zeros. Every machine
can make both, and over a slow link a model takes minutes. What an actor holds besides travels with
it.
"""

from __future__ import annotations

import hashlib
import io
import pickle
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from archipel.actor import Actor, Vector
from archipel.errors import TrainingError
from archipel.train.configs import NoTask, TaskConfig
from archipel.train.cut import parts_of
from archipel.train.pipeline import Pipeline, split
from archipel.train.replica import layout_of
from archipel.train.task import CPU, make_task

SMALL = 1024
"""A vector of fewer entries travels with its actor."""


class OtherWeights(TrainingError):
    """This machine makes other initial weights from the seed than that of the command."""


def initial_weights(config: TaskConfig, seed: int, pipeline: Pipeline | None) -> list[Vector]:
    """The initial weights of each stage of the model, one where there is no pipeline; none where
    nothing is trained.
    """
    if isinstance(config, NoTask):
        return []
    task = make_task(config)
    module = task.seeded_model(seed)
    theta = layout_of(task, module, CPU).read(module)
    if pipeline is None:
        return [theta]
    stages = parts_of(task, seed, pipeline.stages, pipeline.micro_batches)
    return split(theta, [layout_of(task, stage, CPU) for stage in stages])


def digest(weights: Sequence[Vector]) -> bytes:
    """Equal for equal weights, to the bit."""
    hashed = hashlib.blake2b(digest_size=16)
    for vector in weights:
        hashed.update(vector.numpy().data)
    return hashed.digest()


def pack(actor: Actor, weights: Sequence[Vector]) -> bytes:
    """An actor, with a word in the place of each vector that is one of `weights`, or zero."""
    packed = io.BytesIO()
    _Packer(packed, weights).dump(actor)
    return packed.getvalue()


def unpack(packed: bytes, weights: Callable[[], Sequence[Vector]]) -> Actor:
    """The actor that was packed with the same weights. They are asked for if it needs them. Its
    vectors are copies of its own.
    """
    actor: Actor = _Unpacker(io.BytesIO(packed), weights).load()
    return actor


class _Packer(pickle.Pickler):
    def __init__(self, file: io.BytesIO, weights: Sequence[Vector]) -> None:
        super().__init__(file, protocol=5)
        self.weights = weights
        self.packed: dict[int, tuple[Any, ...]] = {}
        """What is said of a vector, by the address of its memory: fields that share it still
        do so afterwards."""

    def persistent_id(self, value: Any) -> tuple[Any, ...] | None:
        if not isinstance(value, Tensor) or not _is_whole(value):
            return None
        where = value.data_ptr()
        if where not in self.packed:
            number = len(self.packed)
            bits = value.view(torch.int32)  # -0.0 is not 0.0, and NaN is NaN
            same = [
                k
                for k, vector in enumerate(self.weights)
                if value.shape == vector.shape and torch.equal(bits, vector.view(torch.int32))
            ]
            if same:
                self.packed[where] = "weights", number, same[0]
            elif not bits.any():
                self.packed[where] = "zeros", number, len(value)
            else:
                return None
        return self.packed[where]


class _Unpacker(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, weights: Callable[[], Sequence[Vector]]) -> None:
        super().__init__(file)
        self.weights = cache(weights)
        self.unpacked: dict[int, Vector] = {}

    def persistent_load(self, said: Any) -> Vector:
        kind, number, what = said
        if number not in self.unpacked:
            self.unpacked[number] = (
                self.weights()[what].clone() if kind == "weights" else torch.zeros(what)
            )
        return self.unpacked[number]


def _is_whole(tensor: Tensor) -> bool:
    """A vector of weights that fills its memory, and not a view of a part of something else."""
    return (
        tensor.dtype == torch.float32
        and tensor.dim() == 1
        and tensor.device == CPU
        and tensor.is_contiguous()
        and len(tensor) >= SMALL
        and tensor.untyped_storage().nbytes() == tensor.nbytes
        and not tensor.requires_grad
    )
