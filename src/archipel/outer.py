"""Outer update rules on weight vectors.

What belongs here: pure functions and small rules that turn outer gradients into a step of slow
weights, each one readable beside its equation. What does not: who waits for whom (that is a
method), or how vectors travel.

Sign: an outer gradient is `start − end` (see `vector.outer_gradient`), so a rule *subtracts* it;
NoLoCo's `Δ = θ − φ` points the other way and is *added*, see `gossip`. All rules change their first
argument in place, apply momentum to the first `parameters` entries only, and average the buffers
behind them.

Speed: such a rule computes next to nothing, so it takes as long as memory needs to read and write
its vectors. That should happen once, not once for each operation: see `stretches`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

STRETCH = 2**18
"""Entries of each vector that a rule takes at a time, 1 MB: they stay in the processor's cache from
the rule's first operation to its last. It is a multiple of what a processor takes at a time, so
that cutting a vector changes no bit.
"""


def stretches(count: int, *vectors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """The first `count` entries of all `vectors`, as views of at most `STRETCH` entries each."""
    if not count:  # nothing is trained
        return ()
    return zip(*(torch.split(vector[:count], STRETCH) for vector in vectors), strict=True)


def mean(vectors: Sequence[Tensor]) -> Tensor:
    """The mean of vectors of one shape, as a new vector; summed in the order given, so
    that every node gets the same bits.
    """
    first, *others = vectors
    if not others:
        return first.clone()
    total = first + others[0]
    for vector in others[1:]:
        total += vector
    return total.div_(len(vectors))


@dataclass
class Nesterov:
    """SGD with Nesterov momentum, as `torch.optim.SGD(nesterov=True)`; DiLoCo's outer optimizer
    (arXiv 2311.08105).

        m ← β·m + g
        θ ← θ − lr·(g + β·m)

    Attributes:
        lr, momentum: lr and β.
        velocity: m, shape (parameters,).
    """

    lr: float
    momentum: float
    velocity: Tensor

    def step(self, theta: Tensor, gradient: Tensor) -> None:
        """One step of `theta` with the averaged outer `gradient`, both of shape (numel,)."""
        count = self.velocity.numel()
        for x, m, g in stretches(count, theta, self.velocity, gradient):
            m.mul_(self.momentum).add_(g)
            x.add_(g, alpha=-self.lr).add_(m, alpha=-self.lr * self.momentum)
        if count < theta.numel():
            theta[count:] = gradient[count:]


@dataclass
class DelayedNesterov:
    """Nesterov momentum that is refreshed once in `buffer` arrivals (Async-Local-SGD, arXiv
    2401.09135, algorithm 3).

    On arrival t of an outer gradient g, with N = buffer, ε = lr, β = momentum:

        A ← A + g
        if (t + 1) mod N = 0:   m ← β·m + A/N;   θ ← θ − ε·((1 − c·N + c)·β·m + g/N);   A ← 0
        otherwise:              θ ← θ − ε·(c·β·m + g/N)

    With N = 1 and c = 0 this is `Nesterov`. Buffers of the model move 1/N of the way to the
    arriving value.

    Attributes:
        lr, momentum, buffer: ε, β, N.
        spread: c in [0, 1/N], how much of the momentum is applied between refreshes.
        velocity, total: m and A, shape (parameters,).
        arrivals: t.
    """

    lr: float
    momentum: float
    buffer: int
    velocity: Tensor
    total: Tensor
    spread: float = 0.0
    arrivals: int = 0

    def step(self, theta: Tensor, gradient: Tensor) -> None:
        """One arrival: `theta` moves by the outer `gradient`, both of shape (numel,)."""
        count = self.velocity.numel()
        self.arrivals += 1
        refresh = self.arrivals % self.buffer == 0
        weight = 1 - self.spread * self.buffer + self.spread if refresh else self.spread
        for x, m, total, g in stretches(count, theta, self.velocity, self.total, gradient):
            total.add_(g)
            if refresh:
                m.mul_(self.momentum).add_(total, alpha=1 / self.buffer)
                total.zero_()
            if weight:
                x.add_(m, alpha=-self.lr * weight * self.momentum)
            x.add_(g, alpha=-self.lr / self.buffer)
        if count < theta.numel():
            theta[count:].lerp_(gradient[count:], 1 / self.buffer)


def nesterov(lr: float, momentum: float, parameters: int) -> Nesterov:
    """A fresh `Nesterov` for vectors with `parameters` leading parameters."""
    return Nesterov(lr, momentum, torch.zeros(parameters))


def delayed_nesterov(
    lr: float, momentum: float, buffer: int, parameters: int, spread: float = 0.0
) -> DelayedNesterov:
    """A fresh `DelayedNesterov` for vectors with `parameters` leading parameters."""
    return DelayedNesterov(
        lr, momentum, buffer, torch.zeros(parameters), torch.zeros(parameters), spread
    )


def gossip(
    phi: Tensor,
    velocity: Tensor,
    deltas: Sequence[Tensor],
    phis: Sequence[Tensor],
    *,
    alpha: float,
    beta: float,
    gamma: float,
    told: Tensor | None = None,
) -> None:
    """NoLoCo's outer step of one member of a group of n (arXiv 2506.10911, equations 2 and 3), in
    place.

        δ ← α·δ + (β/n)·Σ_j Δ_j − γ·(φ − (1/n)·Σ_j φ_j)
        φ ← φ + δ

    Over a group the last term of δ sums to nothing, so it leaves the replicas' mean where it is.
    That needs the same φ_j at all members: where they are rounded on their way, `told` is what the
    others know of mine, and stands in that term for φ.

    Deviation: the paper prints −(β/n)ΣΔ with Δ = θ − φ, which walks away from the inner progress;
    the authors' code adds it, and so do we (`test_outer.py` shows the sign on a quadratic).

    Args:
        phi: my slow weights, shape (numel,); changed.
        velocity: my momentum δ, shape (parameters,); changed.
        deltas: outer gradients `φ_j − θ_j = −Δ_j` of all members, mine among them, in rank order.
        phis: slow weights of all members, in rank order, as they were before this step.
        told: my slow weights as they are among `phis`; None: they are `phi`.
    """
    count = velocity.numel()
    size = len(deltas)
    told = phi if told is None else told
    for mine, momentum, known, *others in stretches(count, phi, velocity, told, *deltas, *phis):
        momentum.mul_(alpha).add_(mean(others[:size]), alpha=-beta)
        momentum.add_(mean(others[size:]).sub_(known), alpha=gamma)
        mine += momentum
    if count < phi.numel():
        phi[count:] = mean([delta[count:] for delta in deltas])
