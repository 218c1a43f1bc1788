"""One node's part in a pipeline's inner steps, when every stage is a process of its own.

What belongs here: the stage, and its messages to the stages before and behind it, over
torch.distributed and point to point. What does not: who holds which stage, and the routes
(`pipeline.py`); the same work in one process (`stages.py`).

Every node knows all routes from the shared seed, so no message says where it belongs: who sends,
its tag and the order say so. A batch is a pure function of its shard and number: the last stage
draws the labels of the micro-batches that come to it itself, instead of having them carried along.
There is no collective. On CPUs all sums are those of `stages.py`, in the same order, to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from archipel.actor import NodeId
from archipel.errors import TrainingError, UserError
from archipel.train.batch import check_loss, loss_of, micro
from archipel.train.cut import Boundary, cut_of, parts_of
from archipel.train.data import Shard
from archipel.train.inner_steps import integers_in
from archipel.train.pipeline import Pipeline
from archipel.train.replica import Replica, Run, finite
from archipel.train.seeding import seed_step
from archipel.train.task import Batch, Task

FORWARD, BACKWARD, NORM = 0, 1, 2
"""Kinds of messages; with the number of the micro-batch they make a tag."""


class Stage:
    """One node of a pipeline. Ranks of the process group (gloo) are those of the workers.

    Args:
        task, run, device: see `Replica`.
        pipeline: the pipeline that this node is part of.
        rank: rank of this node.
        shards: the data of all replicas.
        deadline_s: longest wait for a neighbour.

    Attributes:
        messages, sent_bytes, slow_link_bytes: sent since `take_counts`.
    """

    def __init__(
        self,
        task: Task,
        run: Run,
        device: torch.device,
        pipeline: Pipeline,
        rank: int,
        shards: Sequence[Shard],
        deadline_s: float,
    ) -> None:
        self.task, self.run, self.device = task, run, device
        self.pipeline, self.shards, self.deadline_s = pipeline, shards, deadline_s
        self.me, self.k = divmod(rank, pipeline.stages)
        self.last = self.k == pipeline.stages - 1
        self.boundaries = cut_of(task, pipeline.stages, pipeline.micro_batches).boundaries
        part = parts_of(task, run.seed, pipeline.stages, pipeline.micro_batches)[self.k]
        self.replica = Replica(task, run, device, part)
        self.state = self.replica.new_state()
        self.sending: list[tuple[Any, Tensor]] = []
        self.messages, self.sent_bytes, self.slow_link_bytes = 0, 0, 0

    def train(
        self, theta: Tensor, steps: int, progress: int, cursor: int, after_step: Callable[[], None]
    ) -> list[float]:
        """Take `steps` inner steps from number `cursor` on, together with the nodes that the routes
        lead to.

        `theta` is this stage's vector and changes in place. Returns the losses before each step,
        the means over the micro-batches that came here, at the last stage; nothing elsewhere.

        Raises:
            NonFiniteLoss: one of them is not finite.
            TrainingError: a neighbour did not send in time, or is gone.
        """
        losses = []
        with self.replica.working(self.state, theta):
            for i in range(steps):
                losses.append(self._gradient(cursor + i))
                norm = self.replica.gradient_norm()
                if self.task.gradient_clip is not None:
                    norm = self._norm_of_replica(norm)
                self.replica.step(progress + i * self.run.workers, norm)
                after_step()
        return finite(losses, cursor) if self.last else []

    def gradient(self, theta: Tensor, cursor: int) -> list[float]:
        raise UserError(
            "pipeline: this method asks for single gradients, which a model in stages does not give"
        )

    def apply(self, theta: Tensor, gradient: Tensor, progress: int) -> list[float]:
        raise AssertionError("a stage gives no gradient that could be applied")

    def reset_optimizer(self) -> None:
        self.replica.reset_optimizer(self.state)

    def integers(self) -> dict[str, Tensor]:
        return integers_in(self.replica, self.state)

    def _gradient(self, step: int) -> Tensor:
        """Leave the gradient over the micro-batches that come here in the replica; their mean loss,
        0 but at the last stage.
        """
        routes, parts = self.pipeline.routes(self.run.seed, step), self.pipeline.micro_batches
        whose = [
            int(np.flatnonzero(route[self.k] == self.me)[0]) for route in routes
        ]  # whose micro-batch comes here
        before = (
            [
                self._rank(route[self.k - 1, q], self.k - 1)
                for route, q in zip(routes, whose, strict=True)
            ]
            if self.k
            else []
        )
        after = (
            []
            if self.last
            else [
                self._rank(route[self.k + 1, q], self.k + 1)
                for route, q in zip(routes, whose, strict=True)
            ]
        )
        # Before anything is sent, so that no exchange is held up.
        inputs = [
            self._receive(rank, self.boundaries[self.k - 1], FORWARD, j)
            for j, rank in enumerate(before)
        ]
        returns = [
            self._receive(rank, self.boundaries[self.k], BACKWARD, j)
            for j, rank in enumerate(after)
        ]
        self.replica.zero_gradient()
        batches = (
            {q: micro(self.task.batches(self.shards[q], step), parts) for q in set(whose)}
            if self.last or not self.k
            else {}
        )
        total = torch.zeros(())
        entered: list[Tensor | None] = []
        left: list[Tensor] = []
        for j, q in enumerate(whose):
            seed_step(self.run.seed, self.shards[q], step * parts + j, self.device)
            x = (
                self._wait(
                    inputs[j], before[j], f"micro-batch {j} of inner step {step}"
                ).requires_grad_()
                if self.k
                else None
            )
            y = self._forward(x, batches[q][j] if q in batches else None, q, step * parts + j)
            if self.last:
                total += y.detach().cpu() / parts
            else:
                self._send(after[j], y.detach(), FORWARD, j)
            entered.append(x)
            left.append(y)
        for j in range(parts):
            if self.last:
                (left[j] / parts).backward()  # type: ignore[no-untyped-call]
            else:
                gradient = self._wait(
                    returns[j], after[j], f"gradient of micro-batch {j} of inner step {step}"
                )
                torch.autograd.backward(left[j], gradient)
            if (x := entered[j]) is not None:
                self._send(
                    before[j], torch.zeros_like(x) if x.grad is None else x.grad, BACKWARD, j
                )
        self.replica.collect()
        self._finish_sending()
        return total

    def _forward(self, x: Tensor | None, batch: Batch, q: int, number: int) -> Tensor:
        """The activations that leave this stage, of a micro-batch of replica q; at the last one,
        the loss.
        """
        module = self.replica.module

        def enter() -> None:
            seed_step(self.run.seed, self.shards[q], number, self.device, stage=self.k)

        if x is None:
            return leaving(self.task, module, batch, self.device)
        if self.last:
            loss = loss_of(self.task, _Resumed(module, x, enter), batch, self.device)
            check_loss(loss)
            return loss
        enter()
        with torch.autocast(
            self.device.type, self.task.autocast, enabled=self.task.autocast is not None
        ):
            y: Tensor = module(x)
        return y

    def _norm_of_replica(self, mine: Tensor) -> Tensor:
        """The norm of my replica's whole gradient: squares are summed up on the way to stage 0, and
        the sum comes back.
        """
        square, number = (
            mine.detach().cpu().square().reshape(1),
            Boundary(torch.Size([1]), torch.float32),
        )
        up, down = self._rank(self.me, self.k - 1), self._rank(self.me, self.k + 1)
        if not self.last:
            square = square + self._wait(
                self._receive(down, number, NORM, 0), down, "norm of its gradient"
            )
        if self.k:
            total = self._receive(up, number, NORM, 0)
            self._send(up, square, NORM, 0)
            square = self._wait(total, up, "norm of the whole gradient")
        if not self.last:
            self._send(down, square, NORM, 0)
        self._finish_sending()
        return square.sqrt().squeeze().to(self.device)

    # Messages

    def take_counts(self) -> tuple[int, int, int]:
        """Messages, bytes, and bytes between regions that have been sent since this was asked
        last.
        """
        counts = self.messages, self.sent_bytes, self.slow_link_bytes
        self.messages, self.sent_bytes, self.slow_link_bytes = 0, 0, 0
        return counts

    def _rank(self, replica: int, stage: int) -> int:
        return int(replica) * self.pipeline.stages + stage

    def _node(self, rank: int) -> NodeId:
        replica, stage = divmod(rank, self.pipeline.stages)
        return self.pipeline.nodes[stage][replica]

    def _receive(self, rank: int, boundary: Boundary, kind: int, j: int) -> tuple[Any, Tensor]:
        buffer = boundary.empty()
        return dist.irecv(buffer, rank, tag=3 * j + kind), buffer

    def _wait(self, receiving: tuple[Any, Tensor], rank: int, what: str) -> Tensor:
        work, buffer = receiving
        try:
            work.wait(timedelta(seconds=self.deadline_s))
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            raise TrainingError(
                f"no {what} from {self._node(rank)} within {self.deadline_s:g} s: {reason}"
            ) from None
        return buffer.to(self.device)

    def _send(self, rank: int, tensor: Tensor, kind: int, j: int) -> None:
        tensor = tensor.cpu().contiguous()
        self.sending.append((dist.isend(tensor, rank, tag=3 * j + kind), tensor))
        self.messages += 1
        self.sent_bytes += tensor.nbytes
        if self._node(rank).region != self.pipeline.nodes[self.k][self.me].region:
            self.slow_link_bytes += tensor.nbytes

    def _finish_sending(self) -> None:
        for work, _ in self.sending:
            try:
                work.wait(timedelta(seconds=self.deadline_s))
            except RuntimeError as error:
                raise TrainingError(
                    f"a neighbour did not take a message in time: {str(error).splitlines()[0]}"
                ) from None
        self.sending = []


class _Left(Exception):
    """Raised when activations leave the first stage: the rest of the loss is computed elsewhere."""

    def __init__(self, y: Tensor) -> None:
        self.y = y


class _First(nn.Module):
    """What a task's loss takes for the model, at the first stage."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Any) -> Tensor:
        raise _Left(self.module(x))


class _Resumed(nn.Module):
    """What a task's loss takes for the model, at the last stage: the activations `x` have come from
    elsewhere.
    """

    def __init__(self, module: nn.Module, x: Tensor, enter: Callable[[], None]) -> None:
        super().__init__()
        self.module, self.x, self.enter = module, x, enter

    def forward(self, _: Any) -> Tensor:
        self.enter()
        y: Tensor = self.module(self.x)
        return y


def leaving(task: Task, module: nn.Module, batch: Batch, device: torch.device) -> Tensor:
    """The activations with which `batch` leaves the first stage.

    Raises:
        TypeError: the task's loss does not call the model.
    """
    try:
        loss_of(task, _First(module), batch, device)
    except _Left as left:
        return left.y
    raise TypeError("the task's loss must call the model, once, so that it can be run in stages")
