"""One copy of a model that takes inner steps from a vector.

What belongs here: gradients, the inner optimizer, evaluation, on one device. What does not: which
worker steps when, processes, shared memory.

A replica serves many workers in turn. What makes one worker different from another is its state: a
flag that says whether its optimizer has begun, its integer buffers, and what its optimizer keeps.
These are plain tensors, described by `Replica.state_specs`, that live where the caller wants them:
the pool keeps them in shared memory.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from archipel.train.data import Shard
from archipel.train.task import Batch, Task
from archipel.vector import Layout, buffer_places, integer_buffers, parameters


@dataclass(frozen=True)
class TensorSpec:
    """Shape and type of one tensor of a worker's state."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


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
    """One model, one inner optimizer and one gradient buffer, on `device`.

    Attributes:
        layout: of the model.
        state_specs: the tensors of a worker's state.
    """

    def __init__(
        self, task: Task, run: Run, device: torch.device, module: nn.Module | None = None
    ) -> None:
        self.task, self.run, self.device = task, run, device
        self.module = (task.seeded_model(run.seed) if module is None else module).to(device)
        self.layout = Layout.of(self.module)
        # The fp32 weights that the optimizer moves, and their gradients, each in one piece. A
        # parameter that is fp32 and contiguous *is* its part of them; any other (bf16, strided) has
        # a master copy there.
        self.theta = self.layout.read(self.module).to(device)
        self.gradient = torch.zeros(self.layout.parameters, device=device)
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
            master.grad = slot.view(self.gradient)
            masters[id(parameter)] = master
        # Buffers are looked up by name each time: a model may put a new tensor in a buffer's place.
        views = [slot.view(self.theta) for slot in self.layout.slots[len(masters) :]]
        self.float_places = list(zip(views, buffer_places(self.module, floating=True), strict=True))
        self.integer_places = buffer_places(self.module, floating=False)
        self.first_integers = [tensor.clone() for tensor in integer_buffers(self.module).values()]
        self.optimizer = task.optimizer(self.module)
        for group in self.optimizer.param_groups:
            group["params"] = [
                masters.get(id(parameter), parameter) for parameter in group["params"]
            ]
            group.setdefault("initial_lr", group["lr"])
        self.moved = [
            parameter for group in self.optimizer.param_groups for parameter in group["params"]
        ]
        # Some optimizers (Adagrad) make their state with themselves, and for the model's own
        # parameters.
        made = {
            masters.get(id(parameter), parameter): dict(entries)
            for parameter, entries in self.optimizer.state.items()
        }
        self.optimizer.state = defaultdict(dict, made)
        self.first_state = copy.deepcopy(self._places())
        self.optimizer_keys, optimizer_specs = self._dry_step()
        begun = TensorSpec((), torch.bool)
        integer_specs = [
            TensorSpec(tuple(tensor.shape), tensor.dtype) for tensor in self.first_integers
        ]
        self.state_specs = [begun, *integer_specs, *optimizer_specs]

    # What workers ask for. Vectors have shape (numel,) and are overwritten with the result; so is
    # the worker's state.

    def reset(self, state: Sequence[Tensor]) -> None:
        """Make `state` that of a worker which has not begun."""
        self.reset_optimizer(state)
        for kept, first in zip(state[1:], self.first_integers, strict=False):
            kept.copy_(first)

    def reset_optimizer(self, state: Sequence[Tensor]) -> None:
        """Have the optimizer of `state` begin anew; what it kept may not be finite. Integer buffers
        stay.
        """
        state[0].fill_(False)

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

    def differentiate(
        self, state: Sequence[Tensor], theta: Tensor, shard: Shard, cursor: int
    ) -> list[float]:
        """The unclipped gradient at `theta` on batch `cursor`, with the new buffers behind it; the
        loss, alone in a list.

        Raises:
            NonFiniteLoss: the loss is not finite.
        """
        self._load(theta)
        with self._integers(state):
            loss = self._backward(shard, cursor)
        theta.copy_(self.theta)
        theta[: self.layout.parameters].copy_(self.gradient)
        return finite([loss], cursor)

    def apply(
        self, state: Sequence[Tensor], theta: Tensor, gradient: Tensor, progress: int
    ) -> list[float]:
        """One step of the inner optimizer from `theta` with a known `gradient` (new buffers behind
        it); no losses.
        """
        self._load(theta)
        with self._optimizer(state):
            self.gradient.copy_(gradient[: self.layout.parameters])
            self.step(progress, self.gradient_norm())
        theta.copy_(self.theta)
        theta[self.layout.parameters :] = gradient[self.layout.parameters :]
        return []

    def evaluate(self, theta: Tensor) -> list[float]:
        """Mean loss of `theta` over the task's validation batches, alone in a list."""
        self._load(theta)
        shard = Shard(0, 1, 0, 1, self.run.seed, "valid")
        modes = [(module, module.training) for module in self.module.modules()]
        self.module.eval()
        with torch.no_grad():
            total = sum(float(self._loss(shard, index)) for index in range(self.task.valid_batches))
        for module, training in modes:
            module.training = training
        return [total / self.task.valid_batches]

    # The parts of an inner step: in this order, inside `working`.

    @contextmanager
    def working(self, state: Sequence[Tensor], theta: Tensor) -> Iterator[None]:
        """Be the worker of `state`, at `theta`; both hold what has become of them afterwards."""
        self._load(theta)
        with self._integers(state), self._optimizer(state):
            yield
        theta.copy_(self.theta)

    def zero_gradient(self) -> None:
        self.gradient.zero_()
        for parameter, _ in self.copied:
            parameter.grad = None

    def collect(self) -> None:
        """Take the gradients of parameters that have a master copy, and the new buffers, from the
        model.
        """
        for parameter, master in self.copied:
            if parameter.grad is not None and master.grad is not None:
                master.grad.copy_(parameter.grad)
        for view, (owner, name) in self.float_places:
            view.copy_(getattr(owner, name))

    def gradient_norm(self) -> Tensor:
        norm: Tensor = torch.linalg.vector_norm(self.gradient)
        return norm

    def step(self, progress: int, norm: Tensor) -> None:
        """One step of the optimizer; `norm` is that of the whole model's gradient, of which this
        one may be a part.
        """
        if self.task.gradient_clip is not None:
            self.gradient.mul_(torch.clamp(self.task.gradient_clip / (norm + 1e-6), max=1.0))
        set_learning_rate(self.optimizer, self.task, self.run, progress)
        self.optimizer.step()
        self._copy_masters()

    # How

    def _loss(self, shard: Shard, index: int) -> Tensor:
        return loss_of(self.task, self.module, batch_of(self.task, shard, index), self.device)

    def _backward(self, shard: Shard, index: int) -> Tensor:
        seed_step(self.run.seed, shard, index, self.device)
        self.zero_gradient()
        loss = self._loss(shard, index)
        check_loss(loss)
        loss.backward()  # type: ignore[no-untyped-call]
        self.collect()
        return loss.detach()

    def _load(self, theta: Tensor) -> None:
        self.theta.copy_(theta)
        self._copy_masters()
        for view, (owner, name) in self.float_places:
            getattr(owner, name).copy_(view)

    def _copy_masters(self) -> None:
        with torch.no_grad():
            for parameter, master in self.copied:
                parameter.copy_(master)

    # The state of a worker

    @contextmanager
    def _integers(self, state: Sequence[Tensor]) -> Iterator[None]:
        for kept, (owner, name) in zip(state[1:], self.integer_places, strict=False):
            getattr(owner, name).copy_(kept)
        yield
        for kept, (owner, name) in zip(state[1:], self.integer_places, strict=False):
            kept.copy_(getattr(owner, name))

    @contextmanager
    def _optimizer(self, state: Sequence[Tensor]) -> Iterator[None]:
        begun, tensors = state[0], state[1 + len(self.first_integers) :]
        self.optimizer.state.clear()
        entries = self.constants if begun else self.first_state
        for place, entry in entries.items():
            self._place(place).update(copy.deepcopy(entry))
        if begun:
            for (place, key, number), tensor in zip(self.optimizer_keys, tensors, strict=True):
                here = tensor if self.device.type == "cpu" else tensor.to(self.device)
                self._place(place)[key] = number(here.item()) if number else here
        yield
        for (place, key, number), tensor in zip(self.optimizer_keys, tensors, strict=True):
            value = self._place(place)[key]
            if number:
                tensor.fill_(value)
            elif value is not tensor:  # on the CPU, optimizers have mostly changed it in place
                tensor.copy_(value)
        begun.fill_(True)

    def _dry_step(self) -> tuple[list[StateKey], list[TensorSpec]]:
        """What the optimizer keeps from step to step, found out by taking one and undoing it."""
        before = self.theta.clone()
        self.optimizer.step()
        keys: list[StateKey] = []
        specs: list[TensorSpec] = []
        for place, entries in self._places().items():
            for key, value in entries.items():
                if isinstance(value, Tensor):
                    keys.append((place, key, None))
                    specs.append(TensorSpec(tuple(value.shape), value.dtype))
                elif (
                    type(value) in (int, float)
                    and self.first_state.get(place, {}).get(key) != value
                ):
                    keys.append((place, key, type(value)))
                    specs.append(TensorSpec((), torch.float64))
        # Flags and the like, which stay as the first step leaves them.
        self.constants = {
            place: constants
            for place, entries in self._places().items()
            if place[0] == "parameter"
            and (constants := {k: v for k, v in entries.items() if not isinstance(v, Tensor)})
        }
        for place, entries in self.first_state.items():
            self._place(place).update(copy.deepcopy(entries))
        self.theta.copy_(before)
        return keys, specs

    def _places(self) -> dict[Place, dict[str, Any]]:
        """Where the optimizer keeps things: a dict for each parameter, and one for each group,
        without what we set ourselves.
        """
        ours = ("params", "lr", "initial_lr")
        groups = [
            {key: value for key, value in group.items() if key not in ours}
            for group in self.optimizer.param_groups
        ]
        states = {
            ("parameter", i): self.optimizer.state[parameter]
            for i, parameter in enumerate(self.moved)
        }
        return {("group", i): group for i, group in enumerate(groups)} | states

    def _place(self, place: Place) -> dict[str, Any]:
        kind, i = place
        return (
            self.optimizer.param_groups[i]
            if kind == "group"
            else self.optimizer.state[self.moved[i]]
        )


class Solo:
    """A replica that serves one worker alone, and keeps its state."""

    def __init__(self, replica: Replica, shard: Shard) -> None:
        self.replica, self.shard = replica, shard
        self.state = [torch.zeros(spec.shape, dtype=spec.dtype) for spec in replica.state_specs]
        replica.reset(self.state)

    def train(
        self, theta: Tensor, steps: int, progress: int, cursor: int, after_step: Callable[[], None]
    ) -> list[float]:
        return self.replica.train(
            self.state, theta, self.shard, steps, progress, cursor, after_step
        )

    def differentiate(self, theta: Tensor, cursor: int) -> list[float]:
        return self.replica.differentiate(self.state, theta, self.shard, cursor)

    def apply(self, theta: Tensor, gradient: Tensor, progress: int) -> list[float]:
        return self.replica.apply(self.state, theta, gradient, progress)

    def reset_optimizer(self) -> None:
        self.replica.reset_optimizer(self.state)

    def integers(self) -> dict[str, Tensor]:
        """The integer buffers of the worker's model, by name."""
        names = self.replica.layout.integers
        return {name: tensor.clone() for name, tensor in zip(names, self.state[1:], strict=False)}


Place = tuple[str, int]
"""Where an optimizer keeps something: `("parameter", i)` or `("group", i)`."""
StateKey = tuple[Place, str, type[int] | type[float] | None]
"""A place, the name of something there, and, if that is no tensor, the type of number it is."""


def batch_of(task: Task, shard: Shard, index: int) -> Batch:
    """The task's batch number `index` of a shard.

    Raises:
        ValueError: there is nothing in it. Its loss would be no number, and a learning rate the
            last thing to look at.
    """
    batch = task.batches(shard, index)
    tensors = list(_tensors(batch))
    if tensors and not any(tensor.numel() for tensor in tensors):
        where = (
            "the validation data"
            if shard.split == "valid"
            else f"shard {shard.index} of {shard.of}"
        )
        raise ValueError(
            f"batch {index} of {where} is empty; `batches` must give every shard some data"
        )
    return batch


def loss_of(task: Task, module: nn.Module, batch: Batch, device: torch.device) -> Tensor:
    """The task's loss of `module` on a batch, in the task's precision."""
    try:
        with torch.autocast(device.type, task.autocast, enabled=task.autocast is not None):
            return task.loss(module, _to_device(batch, device))
    except IndexError as error:
        numbers = [
            tensor
            for tensor in _tensors(batch)
            if tensor.numel() and not tensor.is_floating_point()
        ]
        if (
            numbers and str(error) == "index out of range in self"
        ):  # torch's words for an embedding without such a row
            least, most = (
                min(int(tensor.min()) for tensor in numbers),
                max(int(tensor.max()) for tensor in numbers),
            )
            error.args = (
                "an embedding has no such row: a token is outside the vocabulary, or a sequence "
                "longer than the context; "
                f"the numbers in the batch are from {least} to {most}",
            )
        raise


def set_learning_rate(
    optimizer: torch.optim.Optimizer, task: Task, run: Run, progress: int
) -> None:
    """That of the inner step at which all workers together have taken `progress`. Groups hold their
    peak as `initial_lr`.
    """
    if task.schedule is not None:
        factor = task.schedule.factor(progress / run.workers, run.total_steps / run.workers)
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * factor


def check_loss(loss: Any) -> None:
    """Raise a TypeError if there is no gradient to take of it."""
    if not isinstance(loss, Tensor) or loss.ndim or not loss.requires_grad:
        raise TypeError(
            "loss must return a 0-d tensor that depends on the model's parameters, not "
            f"{_describe(loss)}"
        )


def seed_step(seed: int, shard: Shard, index: int, device: torch.device) -> None:
    """Dropout and the like must not depend on which process takes this step, or what it did
    before.
    """
    seed = ((seed * 1_000_003 + shard.index) * 1_000_003 + index) % 2**63
    # torch.manual_seed also seeds devices that are not there, by queueing a stack trace for each:
    # 0.4 ms and a leak.
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    torch.default_generator.manual_seed(seed)


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


def _describe(value: Any) -> str:
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    return f"a tensor of shape {tuple(value.shape)}" + (
        "" if value.requires_grad else " without a gradient"
    )


def _tensors(batch: Any) -> Iterator[Tensor]:
    """Tensors in (nested) tuples, lists and dicts."""
    match batch:
        case Tensor():
            yield batch
        case dict():
            yield from _tensors(list(batch.values()))
        case tuple() | list():
            for value in batch:
                yield from _tensors(value)


def _to_device(batch: Any, device: torch.device) -> Any:
    """Tensors in (nested) tuples, lists and dicts moved to `device`."""
    if device.type == "cpu":
        return batch
    match batch:
        case Tensor():
            return batch.to(device, non_blocking=True)
        case dict():
            return {key: _to_device(value, device) for key, value in batch.items()}
        case tuple() | list():
            return type(batch)(_to_device(value, device) for value in batch)
        case _:
            return batch
