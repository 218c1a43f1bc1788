"""Cutting a model into stages: where it is cut, and what passes from one stage to the next.

What belongs here: the work of a model's blocks, and the cut that balances it. What does not: who
holds which part (`pipeline.py`).

Work is counted in floating-point operations of matrix products, which are the same on every
machine, so that all nodes cut alike. An embedding has many parameters and no work; the output layer
of a large vocabulary has more work than many blocks.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from archipel.errors import UserError
from archipel.train.batch import batch_of, loss_of, micro
from archipel.train.data import Shard
from archipel.train.seeding import seed_everything, seeds_kept
from archipel.train.task import CPU, Batch, Task, blaming
from archipel.vector import parameters


@dataclass(frozen=True)
class Boundary:
    """What passes from one stage to the next for one micro-batch."""

    shape: torch.Size
    dtype: torch.dtype

    def empty(self) -> Tensor:
        return torch.empty(self.shape, dtype=self.dtype)

    @property
    def size_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


@dataclass(frozen=True)
class BlockCost:
    """What one block of a model costs when one micro-batch passes through it.

    Attributes:
        work: floating-point operations of its forward.
        weights: how many trainable parameters it has.
        out: what it passes on.
    """

    work: int
    weights: int
    out: Boundary


@dataclass(frozen=True)
class Cut:
    """A model's stages.

    Attributes:
        ends: for each stage but the last, the number of the first block behind it.
        work: each stage's share of the work; they add up to 1.
        boundaries: for each stage but the last, what passes from it to the next one.
    """

    ends: tuple[int, ...]
    work: tuple[float, ...]
    boundaries: tuple[Boundary, ...]


@cache
def cut_of(task: Task, stages: int, micro_batches: int) -> Cut:
    """Where the model of `task` is cut: the stage with the most work has as little as it can, then
    the next one, and so on.

    Raises:
        UserError: the model cannot be cut like that, or the batch not into micro-batches.
    """
    blocks = blocks_of(task, stages, micro_batches)
    work = [block.work for block in blocks]
    if not any(work):  # a model without matrix products
        work = [block.weights for block in blocks]
    ends = balanced(work, [block.weights > 0 for block in blocks], stages)
    spans = list(itertools.pairwise((0, *ends, len(blocks))))
    shares = tuple(sum(work[start:end]) / sum(work) for start, end in spans)
    return Cut(ends, shares, tuple(blocks[end - 1].out for end in ends))


def parts_of(task: Task, seed: int, stages: int, micro_batches: int) -> list[nn.Sequential]:
    """The stages of a run's model, with its initial weights.

    Raises:
        UserError: see `cut_of`; or two stages would share a parameter.
    """
    ends = cut_of(task, stages, micro_batches).ends
    model = task.seeded_model(seed)
    assert isinstance(model, nn.Sequential)
    return parts(model, ends)


def parts(model: nn.Sequential, ends: Sequence[int]) -> list[nn.Sequential]:
    """A model of blocks in parts that end before the blocks `ends`.

    Raises:
        UserError: two parts would share a parameter.
    """
    blocks = list(model._modules.items())  # with those that are there twice, such as an activation
    found = [
        nn.Sequential(OrderedDict[str, nn.Module](blocks[start:end]))
        for start, end in itertools.pairwise((0, *ends, len(blocks)))
    ]
    owner: dict[int, int] = {}
    for k, part in enumerate(found):
        for name, parameter in part.named_parameters():
            if owner.setdefault(id(parameter), k) != k:
                raise UserError(
                    f"pipeline.stages = {len(found)}: {name!r} of stage {k} is also in stage "
                    f"{owner[id(parameter)]}; "
                    f"untie them (built-in tasks: task.tied = false; causal_lm: task.config = "
                    "{tie_word_embeddings: false})"
                )
    return found


def blocks_of(task: Task, stages: int, micro_batches: int) -> list[BlockCost]:
    """The blocks of the model of `task`, looked at with its first micro-batch.

    Raises:
        UserError: the model is no plain `nn.Sequential`, or cannot be run in stages.
    """
    model = task.seeded_model(0)
    if not isinstance(model, nn.Sequential) or type(model).forward is not nn.Sequential.forward:
        raise UserError(
            f"pipeline.stages = {stages}: the model must be an nn.Sequential of blocks, and is a "
            f"{type(model).__name__}"
        )
    with seeds_kept(CPU), blaming("task.batches"):
        seed_everything(0, CPU)
        batch = batch_of(task, Shard(0, 1, 0, 1, seed=0), 0)
    try:
        batch = micro(batch, micro_batches)[0]
    except UserError as error:
        raise UserError(f"pipeline.micro_batches = {micro_batches}: {error}") from None
    # Without values if it can be, which costs nothing: only sizes are wanted.
    try:
        return look(model, batch, task, FakeTensorMode(allow_non_fake_inputs=True))
    except UserError:
        raise
    except Exception:  # the loss looks at values
        with blaming("task.loss"):
            return look(model, batch, task, nullcontext())


def look(
    model: nn.Sequential, batch: Batch, task: Task, mode: AbstractContextManager[Any]
) -> list[BlockCost]:
    """Run the task's loss on a micro-batch, in `mode`, and note what each block does."""
    counter, watched = FlopCounterMode(display=False), _Watched(model)
    watched.operations = counter.get_total_flops
    # Fused attention is not counted on every device; its plain form is.
    with seeds_kept(CPU), torch.no_grad(), sdpa_kernel(SDPBackend.MATH), mode, counter:
        loss_of(task, watched, batch, CPU)
    if len(watched.seen) != len(model):
        raise UserError(
            "pipeline: the task's loss must call the model, once, so that it can be run in stages"
        )
    return watched.seen


class _Watched(nn.Module):
    """What a task's loss takes for the model: its blocks, each of which is looked at."""

    operations: Callable[[], int]

    def __init__(self, blocks: nn.Sequential) -> None:
        super().__init__()
        self.blocks = blocks
        self.seen: list[BlockCost] = []

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            before = self.operations()
            x = block(x)
            if not isinstance(x, Tensor):
                raise UserError(
                    f"pipeline: block {type(block).__name__} of the model gives a "
                    f"{type(x).__name__}; between stages passes one tensor"
                )
            weights = sum(parameter.numel() for parameter in parameters(block).values())
            work = self.operations() - before
            self.seen.append(BlockCost(work, weights, Boundary(x.shape, x.dtype)))
        return x


def balanced(work: Sequence[int], trained: Sequence[bool], stages: int) -> tuple[int, ...]:
    """Where to cut blocks with so much `work` each into `stages` consecutive runs: the largest run
    is as small as it can be, then the second largest, and so on.

    Raises:
        UserError: not every run could have a block that is `trained`.
    """
    sums = [0, *itertools.accumulate(work)]

    def load(start: int, end: int) -> float:
        return sums[end] - sums[start] if any(trained[start:end]) else math.inf

    # Putting the same run in front of two ways to cut the rest does not change which one is better.
    @cache
    def best(start: int, runs: int) -> tuple[tuple[float, ...], tuple[int, ...]]:
        if runs == 1:
            return (load(start, len(work)),), ()
        options: list[tuple[tuple[float, ...], tuple[int, ...]]] = [((math.inf,) * runs, ())]
        # From the back, so that of equal ways the one is taken in which an activation stays with
        # the layer before it.
        for end in range(len(work) - runs + 1, start, -1):
            loads, ends = best(end, runs - 1)
            ordered = sorted((load(start, end), *loads), reverse=True)
            options.append((tuple(ordered), (end, *ends)))
        return min(options, key=lambda option: option[0])

    loads, ends = best(0, stages)
    if math.isinf(loads[0]):
        raise UserError(
            f"pipeline.stages = {stages}: every stage needs a block with parameters, and the model "
            f"has {sum(trained)}"
        )
    return ends


def boundary_bytes(task: Task, stages: int, micro_batches: int) -> int:
    """Bytes that one batch sends over a boundary between stages: over the widest one."""
    boundaries = cut_of(task, stages, micro_batches).boundaries
    return micro_batches * max((out.size_bytes for out in boundaries), default=0)
