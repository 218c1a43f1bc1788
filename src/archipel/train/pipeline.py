"""A model in stages: who holds which, who feeds whom, how long that takes, and the inner steps
themselves.

What belongs here: everything that is different when one copy of the model is spread over several
nodes. What does not: outer steps (a method sees the nodes of one stage and never knows that there
are others), events, processes.

Every node owns one stage of one replica. An inner step splits each replica's batch into
micro-batches. `routing: random` (NoLoCo, arXiv 2506.10911) draws a permutation for every
micro-batch and every boundary between stages, from the shared seed: it says which replica's next
stage gets the activations, and the gradient comes back the same way. So replicas mix through their
data, without any collective. `routing: fixed` keeps each replica to itself.

The schedule is GPipe's (arXiv 1811.06965): all forwards, then all backwards in the opposite order,
then the optimizer. Stages are taken to cost equally much, a backward twice a forward.
"""

from __future__ import annotations

import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from archipel.actor import Group, NodeId, Vector
from archipel.errors import UserError
from archipel.train.data import Shard
from archipel.train.replica import Replica, Run, check_loss, finite, loss_of, seed_step
from archipel.train.task import Batch, Task
from archipel.vector import Layout, parameters

Routing = Literal["random", "fixed"]

# Who and where


@dataclass(frozen=True)
class Pipeline:
    """Which node holds which stage of which replica, and how micro-batches find their way.

    Attributes:
        nodes: by stage, then by replica.
        micro_batches: M: parts of a replica's batch.
        routing: `random` or `fixed`.
        numels, parameters: each stage's weights, and how many of them are parameters; empty where
            nothing is trained.
        clips: the task clips gradients, by the norm of a whole replica's.
    """

    nodes: tuple[Group, ...]
    micro_batches: int
    routing: Routing
    numels: tuple[int, ...] = ()
    parameters: tuple[int, ...] = ()
    clips: bool = False

    @staticmethod
    def of(
        workers: Sequence[NodeId], stages: int, micro_batches: int, routing: Routing
    ) -> Pipeline:
        """Neighbours in rank order hold neighbouring stages: worker i has stage i % stages of
        replica i // stages.
        """
        return Pipeline(
            tuple(tuple(workers[k::stages]) for k in range(stages)), micro_batches, routing
        )

    @property
    def stages(self) -> int:
        return len(self.nodes)

    @property
    def replicas(self) -> int:
        return len(self.nodes[0])

    @cached_property
    def places(self) -> dict[NodeId, tuple[int, int]]:
        """Stage and replica of each node."""
        return {node: (k, q) for k, stage in enumerate(self.nodes) for q, node in enumerate(stage)}

    def parameters_of(self, node: NodeId) -> int:
        """How many leading entries of a node's vector are parameters; 0 where nothing is
        trained.
        """
        return self.parameters[self.places[node][0]] if self.parameters else 0

    def numel_of(self, node: NodeId) -> int:
        """Entries of a node's vector; 0 where nothing is trained."""
        return self.numels[self.places[node][0]] if self.numels else 0

    def share(self, node: NodeId) -> float:
        """The part of the model's weights that `node` holds; all stages alike where nothing is
        trained.
        """
        return (
            self.numels[self.places[node][0]] / sum(self.numels) if self.numels else 1 / self.stages
        )

    def ranks(self, team: Sequence[int]) -> list[int]:
        """The ranks of the nodes of the replicas `team`, by stage, then by replica."""
        return [q * self.stages + k for k in range(self.stages) for q in team]

    def team(self, node: NodeId) -> tuple[int, ...]:
        """The replicas whose nodes take their inner steps together with `node`: all under random
        routing, else its own.
        """
        return tuple(range(self.replicas)) if self.routing == "random" else (self.places[node][1],)

    def routes(self, seed: int, step: int) -> np.ndarray:
        """Shape (micro_batches, stages, replicas): which replica's stage k computes micro-batch j
        of replica q's batch.

        `seed` is the run's, `step` the number of the inner step. Stage 0 computes its own. Between
        two neighbouring stages lies a uniformly random permutation, independent of all others.
        """
        own = np.tile(np.arange(self.replicas), (self.micro_batches, self.stages, 1))
        if self.routing == "random":
            own[:, 1:] = np.random.default_rng((seed, 0x907E, step)).permuted(own[:, 1:], axis=2)
        return own

    def neighbours(self) -> Iterator[tuple[NodeId, tuple[NodeId, ...]]]:
        """Each node but those of the last stage, and the nodes of the next stage that it may
        exchange activations with.
        """
        for before, after in itertools.pairwise(self.nodes):
            for q, node in enumerate(before):
                yield node, after if self.routing == "random" else after[q : q + 1]


# The model in parts


def cut(model: nn.Module, stages: int) -> list[nn.Sequential]:
    """`model`, a list of blocks, in consecutive parts; the largest number of parameters in a part
    is as small as it can be.

    Raises:
        UserError: it is no plain `nn.Sequential`, has too few blocks, or two parts would share a
            parameter.
    """
    if not isinstance(model, nn.Sequential) or type(model).forward is not nn.Sequential.forward:
        kind = type(model).__name__
        raise UserError(
            f"pipeline.stages = {stages}: the model must be an nn.Sequential of blocks, and is a "
            f"{kind}"
        )
    blocks = list(model.named_children())
    sizes = [
        sum(parameter.numel() for parameter in parameters(block).values()) for _, block in blocks
    ]
    weight, ends = _balanced(tuple(sizes), stages)
    if math.isinf(weight):
        raise UserError(
            f"pipeline.stages = {stages}: every stage needs a block with parameters, and the model "
            f"has {sum(map(bool, sizes))}"
        )
    parts = [
        nn.Sequential(OrderedDict(blocks[start:end]))
        for start, end in itertools.pairwise((0, *ends, len(blocks)))
    ]
    owner: dict[int, int] = {}
    for k, part in enumerate(parts):
        for name, parameter in part.named_parameters():
            if owner.setdefault(id(parameter), k) != k:
                raise UserError(
                    f"pipeline.stages = {stages}: {name!r} of stage {k} is also in stage "
                    f"{owner[id(parameter)]}; "
                    f"untie them (built-in tasks: task.tied = false)"
                )
    return parts


def _balanced(sizes: tuple[int, ...], stages: int) -> tuple[float, tuple[int, ...]]:
    """The smallest possible largest sum of `stages` consecutive runs of `sizes`, none of them 0,
    and where the runs are cut.
    """

    @cache
    def best(start: int, runs: int) -> tuple[float, tuple[int, ...]]:
        if runs == 1:
            return sum(sizes[start:]) or math.inf, ()
        options: list[tuple[float, tuple[int, ...]]] = [(math.inf, ())]
        for end in range(start + 1, len(sizes) - runs + 2):
            rest, ends = best(end, runs - 1)
            options.append((max(sum(sizes[start:end]) or math.inf, rest), (end, *ends)))
        return min(options)

    return best(0, stages)


def split(theta: Vector, layouts: Sequence[Layout]) -> list[Vector]:
    """The stages' vectors from that of the whole model (all parameters, then all buffers), as
    copies.
    """
    counts = [layout.parameters for layout in layouts]
    sizes = counts + [layout.numel - layout.parameters for layout in layouts]
    pieces = torch.split(theta, sizes)
    return [
        torch.cat(pair) for pair in zip(pieces[: len(counts)], pieces[len(counts) :], strict=True)
    ]


def join(parts: Sequence[Vector], counts: Sequence[int]) -> Vector:
    """The whole model's vector from its stages', of which the first `counts` entries are
    parameters: the inverse of `split`.
    """
    if not counts:  # nothing is trained
        return parts[0]
    pairs = list(zip(parts, counts, strict=True))
    return torch.cat(
        [part[:count] for part, count in pairs] + [part[count:] for part, count in pairs]
    )


def boundary_bytes(task: Task, modules: Sequence[nn.Module], shard: Shard) -> int:
    """Bytes that one batch sends over a boundary between stages: over the widest one."""
    sizes = [0]
    hooks = [
        module.register_forward_hook(lambda _m, _i, out: sizes.append(out.nbytes))
        for module in modules[:-1]
    ]
    with torch.no_grad():
        loss_of(task, nn.Sequential(*modules), task.batches(shard, 0), torch.device("cpu"))
    for hook in hooks:
        hook.remove()
    return max(sizes)


# How long it takes


def step_end_s(
    routes: np.ndarray,
    start_s: np.ndarray,
    forward_s: np.ndarray,
    transfer_s: Callable[[int, int, int, int], float],
) -> np.ndarray:
    """When each node has done its forwards and backwards of one inner step: a max-plus recursion.

    A node works on one micro-batch at a time, in order; a micro-batch starts there when the node is
    free and its input has come.

    Args:
        routes: see `Pipeline.routes`, shape (micro_batches, stages, replicas).
        start_s: when each node is free, shape (stages, replicas).
        forward_s: its seconds for the forward of one micro-batch, same shape; a backward takes
            twice that.
        transfer_s: seconds of a micro-batch's activations, or their gradient, from node (stage,
            replica) to node (stage, replica).
    """
    free_s, backward_s = start_s.copy(), 2 * forward_s
    micro_batches, stages, replicas = routes.shape

    def pass_on(route: np.ndarray, k: int, to: int, done_s: np.ndarray) -> np.ndarray:
        return np.array(
            [done_s[q] + transfer_s(k, route[k, q], to, route[to, q]) for q in range(replicas)]
        )

    for route in routes:
        ready_s = start_s[0]
        for k in range(stages):
            free_s[k, route[k]] = done_s = (
                np.maximum(free_s[k, route[k]], ready_s) + forward_s[k, route[k]]
            )
            ready_s = pass_on(route, k, k + 1, done_s) if k + 1 < stages else done_s
    for j in reversed(range(micro_batches)):
        route = routes[j]
        ready_s = free_s[-1, route[-1]]
        for k in reversed(range(stages)):
            free_s[k, route[k]] = done_s = (
                np.maximum(free_s[k, route[k]], ready_s) + backward_s[k, route[k]]
            )
            ready_s = pass_on(route, k, k - 1, done_s) if k else done_s
    return free_s


def norm_end_s(end_s: np.ndarray, note_s: Callable[[int, int, int, int], float]) -> np.ndarray:
    """When each node knows the norm of its replica's whole gradient: a number goes to stage 0 and
    its sum comes back.

    Gradients are clipped by that norm, as if the replica were not split. `note_s`: seconds of a
    number from node to node.
    """
    known_s = end_s.copy()
    stages, replicas = end_s.shape
    for q in range(replicas):
        for k in reversed(range(stages - 1)):
            known_s[k, q] = max(known_s[k, q], known_s[k + 1, q] + note_s(k + 1, q, k, q))
        for k in range(1, stages):
            known_s[k, q] = known_s[k - 1, q] + note_s(k - 1, q, k, q)
    return known_s


# What it computes


class Stages:
    """A replica of every node of a pipeline, in one process, and the inner steps that they take
    together.
    """

    def __init__(self, task: Task, run: Run, device: torch.device, pipeline: Pipeline) -> None:
        self.task, self.run, self.device, self.pipeline = task, run, device, pipeline
        models = [
            cut(task.seeded_model(run.seed), pipeline.stages) for _ in range(pipeline.replicas)
        ]
        self.replicas = [
            [Replica(task, run, device, model[k]) for model in models]
            for k in range(pipeline.stages)
        ]

    def train(
        self,
        team: Sequence[int],
        states: Sequence[Sequence[Tensor]],
        thetas: Sequence[Tensor],
        shards: Sequence[Shard],
        steps: int,
        progress: Sequence[int],
        cursor: int,
    ) -> list[list[float]]:
        """Take `steps` inner steps from number `cursor` on with the replicas `team`: all of them,
        or any that keep to themselves.

        `states`, `thetas` (both changed in place) and `progress` go by stage, then by replica of
        the team; `shards` has one for each replica of the pipeline. Returns for each of those the
        losses that its last stage saw, before each step: the mean over the micro-batches that came
        there; nothing for replicas outside the team.

        Raises:
            NonFiniteLoss: one of them is not finite.
        """
        nodes = [row[q] for row in self.replicas for q in team]
        losses: list[list[Tensor]] = [[] for _ in self.replicas[0]]
        with ExitStack() as stack:
            for node, state, theta in zip(nodes, states, thetas, strict=True):
                stack.enter_context(node.working(state, theta))
            for i in range(steps):
                for q, loss in self._gradients(team, shards, cursor + i).items():
                    losses[q].append(loss)
                norms = {
                    q: torch.stack([row[q].gradient_norm() for row in self.replicas]).norm()
                    for q in team
                }
                for node, told, q in zip(nodes, progress, itertools.cycle(team), strict=False):
                    node.step(told + i * self.run.workers, norms[q])
        return [finite(one, cursor) for one in losses]

    def _gradients(
        self, team: Sequence[int], shards: Sequence[Shard], step: int
    ) -> dict[int, Tensor]:
        """Leave in every node the gradient over the micro-batches that came to it; the mean loss of
        each last stage.
        """
        micro_batches = self.pipeline.micro_batches
        routes = self.pipeline.routes(self.run.seed, step)
        losses = {q: torch.zeros(()) for q in team}
        for row in self.replicas:
            for q in team:
                row[q].zero_gradient()
        for q in team:
            for j, batch in enumerate(micro(self.task.batches(shards[q], step), micro_batches)):
                seed_step(self.run.seed, shards[q], step * micro_batches + j, self.device)
                way = [row[routes[j, k, q]].module for k, row in enumerate(self.replicas)]
                loss = loss_of(self.task, nn.Sequential(*way), batch, self.device)
                check_loss(loss)
                (loss / micro_batches).backward()  # type: ignore[no-untyped-call]
                losses[routes[j, -1, q]] += loss.detach().cpu() / micro_batches
        for row in self.replicas:
            for q in team:
                row[q].collect()
        return losses


def check_micro_batches(task: Task, shard: Shard, micro_batches: int) -> None:
    """Raise a `UserError` if the task's first batch cannot be cut into micro-batches."""
    try:
        micro(task.batches(shard, 0), micro_batches)
    except UserError as error:
        raise UserError(f"pipeline.micro_batches = {micro_batches}: {error}") from None


def micro(batch: Batch, parts: int) -> list[Batch]:
    """`batch` in equal parts: every tensor in (nested) tuples, lists and dicts is cut along its
    first dimension.

    Raises:
        UserError: a tensor's first dimension is not a multiple of `parts`.
    """
    if parts == 1:
        return [batch]
    pieces: list[Any]
    match batch:
        case Tensor():
            if not batch.ndim or len(batch) % parts:
                raise UserError(
                    f"{parts} equal parts cannot be made of a batch of shape {tuple(batch.shape)}"
                )
            return list(batch.chunk(parts))
        case dict():
            pieces = [micro(value, parts) for value in batch.values()]
            return [dict(zip(batch, values, strict=True)) for values in zip(*pieces, strict=True)]
        case tuple() | list():
            pieces = [micro(value, parts) for value in batch]
            return [type(batch)(values) for values in zip(*pieces, strict=True)]
        case _:
            return [batch] * parts
