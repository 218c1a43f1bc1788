"""Trying out a task before a run starts, so that a mistake in it becomes one clear line at once.

What belongs here: what a few inner steps of a worker, which is then thrown away, can find out. What
does not: what can be checked without an inner step (`task.py`), or only in a whole run.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from safetensors.torch import save
from torch import Tensor

from archipel.errors import UserError
from archipel.train.batch import batch_of, check_loss, first_part, loss_of
from archipel.train.data import Shard
from archipel.train.replica import NonFiniteLoss, Replica
from archipel.train.seeding import seed_step, seeds_kept
from archipel.train.task import blaming


def try_out(replica: Replica, shard: Shard) -> None:
    """Train and evaluate a worker that is thrown away; any other can use `replica` afterwards.

    Raises:
        UserError: one of the task's functions fails or gives the wrong thing, its model cannot be
            saved, or it does not do the same twice.
    """
    _check_saved(replica)
    with seeds_kept(replica.device):
        _check_functions(replica, shard)
        try:
            losses, once = _two_steps(replica, shard)
            # On GPUs sums are in no certain order.
            if replica.device.type == "cpu":
                again, twice = _two_steps(replica, shard)
                _check_equal(replica, losses[0] == again[0], torch.equal(_bits(once), _bits(twice)))
        except NonFiniteLoss:  # a run judges that
            pass


def _check_functions(replica: Replica, shard: Shard) -> None:
    """Call each of the task's functions once, and blame the one that fails."""
    task, device = replica.task, replica.device
    for where in (shard, replace(shard, split="valid")):
        seed_step(shard.seed, shard, 0, device)
        with blaming("task.batches"):
            batch = batch_of(task, where, 0)
        if where is shard:
            batch = first_part(task, batch)
        try:
            with blaming("task.loss"):
                loss = loss_of(task, replica.module, batch, device)
        except UserError as error:
            hint = " (`batches` has returned None)" if batch is None else ""
            raise UserError(f"{error}{hint}") from error
        check_loss(loss)


def _two_steps(replica: Replica, shard: Shard) -> tuple[list[float], Tensor]:
    """The losses and weights of a worker's first two steps.

    Raises:
        NonFiniteLoss: a loss is not finite.
        UserError: the task fails.
    """
    theta = replica.first.clone()
    try:
        with blaming("task"):
            losses = replica.train(replica.new_state(), theta, shard, 2, 0, 0)
    except UserError as error:
        if isinstance(error.__cause__, NonFiniteLoss):  # no mistake that can be told beforehand
            raise error.__cause__ from None
        raise
    return losses, theta


def _check_equal(replica: Replica, losses: bool, weights: bool) -> None:
    """`losses`: the first ones are equal, before any optimizer has done anything; `weights`: those
    after both steps.
    """
    if losses and weights:
        return
    kind = type(replica.optimizer).__name__
    who = f"task.optimizer: {kind} keeps" if losses else "task: its model, loss or batches keep"
    raise UserError(
        f"{who} something between steps that cannot be seen: a worker's first two inner steps, "
        "taken twice, gave different results. Workers take turns, so keep numbers and tensors in "
        "attributes of the optimizer and buffers of the model, draw from torch's, NumPy's or "
        "Python's global random numbers, and make a batch of its shard and number alone"
    )


def _bits(vector: Tensor) -> Tensor:
    return vector.view(torch.int32)


def _check_saved(replica: Replica) -> None:
    for name, tensor in replica.layout.kept.items():
        try:
            save({name: torch.empty(0, dtype=tensor.dtype)})
            whole = tensor.layout == torch.strided
        except (KeyError, ValueError):
            whole = False
        if not whole:
            raise UserError(
                f"task.model: {name!r} is {tensor.dtype} ({tensor.layout}), which "
                "weights.safetensors cannot hold; register it with persistent=False"
            )
