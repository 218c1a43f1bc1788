"""One copy of a model that takes inner steps from a vector.

What belongs here: gradients, the inner optimizer, evaluation, on one device. What does not: which
worker steps when, processes, shared memory.

A replica serves many workers in turn. What makes one worker different from another is its state:
flags (the first of which says whether its optimizer has begun), its integer buffers, and what its
optimizer keeps. These are plain tensors, described by `Replica.state_specs`, that live where the
caller wants them: the pool keeps them in shared memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from archipel.errors import UserError
from archipel.train.batch import batch_of, check_loss, loss_of, micro
from archipel.train.data import Shard
from archipel.train.optimizer_state import OptimizerState, TensorSpec, swap
from archipel.train.seeding import seed_everything, seed_step, seeds_kept
from archipel.train.statistics import Unchanged, changing
from archipel.train.task import Batch, Schedule, Task
from archipel.vector import Layout, beside, parameters, places

VALIDATION_SEED = 0x7A11D


@dataclass(frozen=True)
class Run:
    """What the learning rate and the random numbers of a run depend on.

    Attributes:
        total_steps: planned inner steps of all workers together.
        workers: how many workers there are.
        seed: of the run.
    """

    total_steps: int
    workers: int
    seed: int


class NonFiniteLoss(ArithmeticError):
    """A loss is not a finite number; says which, and at which inner step of the worker."""


class Replica:
    """One model, one inner optimizer and one gradient, on `device`.

    Attributes:
        layout: of the model.
        first: its initial weights, shape (numel,), on the CPU.
        state_specs: the tensors of a worker's state.

    Raises:
        UserError: the task's model or optimizer cannot be trained like this.
    """

    def __init__(
        self, task: Task, run: Run, device: torch.device, module: nn.Module | None = None
    ) -> None:
        self.task, self.run, self.device = task, run, device
        self.module = (task.seeded_model(run.seed) if module is None else module).to(device)
        self.layout = layout_of(task, self.module, device)
        # The fp32 weights that the optimizer moves, and their gradients, each in one piece. A
        # parameter that is fp32 and contiguous *is* its part of them; any other (bf16, strided) has
        # a master copy there.
        self.first = self.layout.read(self.module)
        self.theta = self.first.to(device, copy=True)
        self.grad = torch.zeros(self.layout.parameters, device=device)
        self.copied: list[tuple[nn.Parameter, nn.Parameter]] = []
        masters: dict[int, nn.Parameter] = {}
        for slot, parameter in zip(
            self.layout.slots, parameters(self.module).values(), strict=False
        ):
            master = parameter
            if parameter.dtype == torch.float32 and parameter.is_contiguous():
                parameter.data = slot.view(self.theta)
            else:
                master = nn.Parameter(slot.view(self.theta))
                self.copied.append((parameter, master))
            masters[id(parameter)] = master
        self.masters = list(masters.values())
        # Not views, which would count all their changes together: `collect` tells by these counts
        # which parameters have got a gradient.
        self.grads = [
            slot.view(self.grad).data for slot, _ in zip(self.layout.slots, masters, strict=False)
        ]
        last = max(self.layout.parameters - 1, 0)
        self.starts = torch.tensor(
            [min(slot.start, last) for slot, _ in zip(self.layout.slots, masters, strict=False)],
            device=device,
        )
        self.versions: list[int] = []
        self.zero_gradient()
        # Buffers are looked up by name each time: a model may put a new tensor in a buffer's place.
        tail = self.layout.slots[len(masters) :]
        owners = places(self.module, [slot.name for slot in tail])
        self.statistics = [
            (slot.view(self.theta), place) for slot, place in zip(tail, owners, strict=True)
        ]
        self.integer_places = places(self.module, self.layout.integers)
        self.first_integers = [getattr(owner, name).clone() for owner, name in self.integer_places]
        self.unchanged = Unchanged(self.module, self.layout.kept.keys() & beside(self.module))
        self.optimizer = task.optimizer_of(self.module)
        if self.copied:
            swap(self.optimizer, masters)
        for group in self.optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        self.optimizer_state = OptimizerState(
            self.optimizer, [self.theta, self.grad, *self.module.parameters()], self._dry_step
        )
        self.theta.copy_(self.first)
        self._copy_masters()
        self.zero_gradient()
        begun, *specs = self.optimizer_state.specs
        integer_specs = [
            TensorSpec(tuple(tensor.shape), tensor.dtype) for tensor in self.first_integers
        ]
        self.state_specs = [begun, *integer_specs, *specs]

    # What workers ask for. Vectors have shape (numel,) and are overwritten with the result; so is
    # the worker's state.

    def new_state(self) -> list[Tensor]:
        """The state of a worker that has not begun, in memory of its own."""
        state = [torch.zeros(spec.shape, dtype=spec.dtype) for spec in self.state_specs]
        self.reset(state)
        return state

    def reset(self, state: Sequence[Tensor]) -> None:
        """Make `state` that of a worker which has not begun."""
        self.reset_optimizer(state)
        for kept, first in zip(state[1:], self.first_integers, strict=False):
            kept.copy_(first)

    def reset_optimizer(self, state: Sequence[Tensor]) -> None:
        """Have the optimizer of `state` begin anew; what it kept may not be finite. Integer buffers
        stay.
        """
        state[0].zero_()

    def train(
        self,
        state: Sequence[Tensor],
        theta: Tensor,
        shard: Shard,
        steps: int,
        progress: int,
        cursor: int,
        after_step: Callable[[], None] = lambda: None,
    ) -> list[float]:
        """Take `steps` inner steps from `theta`, on the batches from number `cursor` on; the losses
        before each step.

        `after_step` is called after each of them: a live run counts them there, and keeps its pace.

        Raises:
            NonFiniteLoss: a loss is not finite.
        """
        with self.working(state, theta):
            losses = []
            for k in range(steps):
                losses.append(self._backward(shard, cursor + k))
                self.step(progress + k * self.run.workers, self.gradient_norm())
                after_step()
        return finite(losses, cursor)

    def gradient(
        self, state: Sequence[Tensor], theta: Tensor, shard: Shard, cursor: int
    ) -> list[float]:
        """The unclipped gradient at `theta` on batch `cursor`, with the new statistics behind it;
        the loss, alone in a list. What the batch does not touch has a gradient of 0.

        Raises:
            NonFiniteLoss: the loss is not finite.
        """
        self._load(theta)
        with self._integers(state):
            loss = self._backward(shard, cursor)
        theta.copy_(self.theta)
        theta[: self.layout.parameters].copy_(self.grad)
        return finite([loss], cursor)

    def apply(
        self, state: Sequence[Tensor], theta: Tensor, gradient: Tensor, progress: int
    ) -> list[float]:
        """One step of the inner optimizer from `theta` with a known `gradient` (new statistics
        behind it); no losses. A parameter whose gradient is 0 everywhere is taken for one that no
        batch has touched, and stays.
        """
        self._load(theta)
        with self._optimizer(state):
            seed_everything(self.run.seed * 1_000_003 + progress, self.device)
            self.zero_gradient()
            self.grad.copy_(gradient[: self.layout.parameters])
            self._mark_gradients()
            self.step(progress, self.gradient_norm())
        theta.copy_(self.theta)
        theta[self.layout.parameters :] = gradient[self.layout.parameters :]
        return []

    def evaluate(self, theta: Tensor, integers: Sequence[Tensor] | None = None) -> list[float]:
        """Mean loss of `theta` over the task's validation batches, alone in a list.

        `integers`: the integer buffers, in the order of `layout.integers`; None: those of a model
        that has not been trained.
        """
        self._load(theta)
        self._set_integers(self.first_integers if integers is None else integers)
        modes = [(module, module.training) for module in self.module.modules()]
        self.module.eval()
        with torch.no_grad(), seeds_kept(self.device):
            losses = [self._valid_loss(index) for index in range(self.task.valid_batches)]
        for module, training in modes:
            module.training = training
        return [sum(losses) / self.task.valid_batches]

    def learning_rate(self, progress: int) -> float:
        """The highest one of all parameters, when all workers together have taken `progress` inner
        steps.
        """
        schedule = self.task.schedule
        factor = 1.0 if schedule is None else factor_at(schedule, self.run, progress)
        return factor * max(float(group["initial_lr"]) for group in self.optimizer.param_groups)

    # The parts of an inner step: in this order, inside `working`.

    @contextmanager
    def working(self, state: Sequence[Tensor], theta: Tensor) -> Iterator[None]:
        """Be the worker of `state`, at `theta`; both hold what has become of them afterwards."""
        self._load(theta)
        with self._integers(state), self._optimizer(state):
            yield
        theta.copy_(self.theta)

    def zero_gradient(self) -> None:
        self.grad.zero_()
        for master, grad in zip(self.masters, self.grads, strict=True):
            master.grad = grad
        for parameter, _ in self.copied:
            parameter.grad = None
        self.versions = [grad._version for grad in self.grads]

    def collect(self) -> None:
        """Take the gradients of parameters that have a master copy, and the new statistics, from
        the model. What the batch has not touched has no gradient, as in plain torch.
        """
        for parameter, master in self.copied:
            if parameter.grad is not None and master.grad is not None:
                master.grad.copy_(parameter.grad)
        for master, grad, version in zip(self.masters, self.grads, self.versions, strict=True):
            if master.grad is not grad and master.grad is not None:  # autograd may replace it
                grad.copy_(master.grad)
                master.grad = grad
            elif grad._version == version:
                master.grad = None
        for view, (owner, name) in self.statistics:
            view.copy_(getattr(owner, name))

    def gradient_norm(self) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(self.grad)
        return norm

    def step(self, progress: int, norm: Tensor) -> None:
        """One step of the optimizer; `norm` is that of the whole model's gradient, of which this
        one may be a part.
        """
        if self.task.gradient_clip is not None:
            self.grad.mul_(torch.clamp(self.task.gradient_clip / (norm + 1e-6), max=1.0))
        set_learning_rate(self.optimizer, self.task, self.run, progress)
        self.optimizer.step()
        self._copy_masters()

    # How

    def _valid_loss(self, index: int) -> float:
        """The same noise in all runs, whatever their seed, as the data."""
        shard = Shard(0, 1, 0, 1, self.run.seed, "valid")
        seed_everything(VALIDATION_SEED + index, self.device)
        loss = loss_of(self.task, self.module, batch_of(self.task, shard, index), self.device)
        check_loss(loss)
        return float(loss)

    def _backward(self, shard: Shard, index: int) -> Tensor:
        seed_step(self.run.seed, shard, index, self.device)
        self.zero_gradient()
        batch = batch_of(self.task, shard, index)
        loss = add_gradient(self.task, self.module, batch, self.device)
        self.collect()
        return loss

    def _load(self, theta: Tensor) -> None:
        self.theta.copy_(theta)
        self._copy_masters()
        with torch.no_grad():
            for view, (owner, name) in self.statistics:
                getattr(owner, name).copy_(view)

    def _copy_masters(self) -> None:
        with torch.no_grad():
            for parameter, master in self.copied:
                parameter.copy_(master)

    def _mark_gradients(self) -> None:
        """Have those parameters no gradient of which the known one is 0 everywhere: no worker's
        batch has touched them.
        """
        # Most have a number other than 0 in the first place, and are not looked at any further.
        first = self.grad[self.starts].tolist()
        for value, master, grad in zip(first, self.masters, self.grads, strict=True):
            if not value and not grad.any():
                master.grad = None

    # The state of a worker

    def _set_integers(self, values: Sequence[Tensor]) -> None:
        for value, (owner, name) in zip(values, self.integer_places, strict=False):
            getattr(owner, name).copy_(value)

    @contextmanager
    def _integers(self, state: Sequence[Tensor]) -> Iterator[None]:
        self._set_integers(state[1:])
        yield
        for kept, (owner, name) in zip(state[1:], self.integer_places, strict=False):
            kept.copy_(getattr(owner, name))
        self.unchanged.check()

    @contextmanager
    def _optimizer(self, state: Sequence[Tensor]) -> Iterator[None]:
        own = [state[0], *state[1 + len(self.first_integers) :]]
        self.optimizer_state.put_in(own)
        yield
        self.optimizer_state.take_out(own)

    def _dry_step(self, number: int) -> None:
        """A step with a made-up gradient: what the optimizer keeps is found out by two of them."""
        self.zero_gradient()
        seed = torch.Generator(self.device).manual_seed(number)
        self.grad.normal_(generator=seed)
        with seeds_kept(self.device):
            self.optimizer.step()


def add_gradient(task: Task, module: nn.Module, batch: Batch, device: torch.device) -> Tensor:
    """Add the gradient of the task's loss on a batch to those of `module`, one part of the batch
    after the other; the mean loss, a 0-d tensor.
    """
    parts, losses = micro(batch, task.gradient_accumulation), []
    for part in parts:
        loss = loss_of(task, module, part, device)
        check_loss(loss)
        loss = loss / len(parts) if len(parts) > 1 else loss
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def layout_of(task: Task, module: nn.Module, device: torch.device) -> Layout:
    """Where the weights of a module lie in a vector: of `task`'s model or a part of it.

    Raises:
        UserError: it cannot be trained; see `Layout.of` and `statistics.changing`.
    """
    try:
        return Layout.of(module, changing(task, device))
    except ValueError as error:
        raise UserError(f"task.model: {error}") from error


def set_learning_rate(
    optimizer: torch.optim.Optimizer, task: Task, run: Run, progress: int
) -> None:
    """That of the inner step at which all workers together have taken `progress`. Groups hold their
    peak as `initial_lr`.
    """
    if task.schedule is not None:
        factor = factor_at(task.schedule, run, progress)
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor


def factor_at(schedule: Schedule, run: Run, progress: int) -> float:
    """Of the peak learning rate, when all workers together have taken `progress` inner steps."""
    return schedule.factor(progress / run.workers, run.total_steps / run.workers)


def finite(losses: Sequence[Tensor], cursor: int) -> list[float]:
    """The losses of the inner steps from number `cursor` on.

    Raises:
        NonFiniteLoss: one of them is not finite.
    """
    values = [float(loss) for loss in losses]
    for k, value in enumerate(values):
        if not math.isfinite(value):
            raise NonFiniteLoss(f"the training loss is {value} at its inner step {cursor + k}")
    return values
