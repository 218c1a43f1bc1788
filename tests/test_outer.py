"""`outer.py` against `torch.optim.SGD`, and against NumPy written from the equations alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from archipel import outer
from archipel.outer import DelayedNesterov, Nesterov, delayed_nesterov, gossip, mean, nesterov

BUFFERS = 2
"""Entries behind the parameters in the vectors of these tests."""


def vectors(count: int, numel: int, seed: int) -> list[Tensor]:
    return list(torch.randn(count, numel, generator=torch.Generator().manual_seed(seed)))


def torch_sgd(theta: Tensor, gradients: list[Tensor], lr: float, momentum: float) -> list[Tensor]:
    """The weights after each step of torch's own SGD with Nesterov momentum."""
    weight = torch.nn.Parameter(theta.clone())
    sgd = torch.optim.SGD([weight], lr=lr, momentum=momentum, nesterov=True)
    path = []
    for gradient in gradients:
        weight.grad = gradient.clone()
        sgd.step()
        path.append(weight.detach().clone())
    return path


def test_to_cut_vectors_in_stretches_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """1003 parameters in one piece, and in 16 pieces of which the last one is odd."""
    after = []
    for stretch in (10**6, 64):
        monkeypatch.setattr(outer, "STRETCH", stretch)
        theta, phi, velocity, *others = vectors(8, 1003 + BUFFERS, seed=4)
        velocity = velocity[:1003].clone()
        rules = (nesterov(0.7, 0.9, 1003), delayed_nesterov(1.6, 0.9, 2, 1003, spread=0.3))
        for rule in rules:
            for gradient in others:
                rule.step(theta, gradient)
        gossip(phi, velocity, others[:3], [phi, *others[3:]], alpha=0.5, beta=0.7, gamma=0.6)
        after.append([theta, phi, velocity, *(rule.velocity for rule in rules)])
    for whole, cut in zip(*after, strict=True):
        assert torch.equal(whole, cut)


# The mean


def test_mean_is_the_arithmetic_mean() -> None:
    stacked = vectors(5, 7, seed=0)
    np.testing.assert_allclose(
        mean(stacked).numpy(),
        np.mean([v.double().numpy() for v in stacked], axis=0),
        rtol=1e-6,
        atol=1e-7,
    )


def test_mean_of_one_is_a_copy() -> None:
    vector = torch.tensor([1.0, 2.0])
    result = mean([vector])
    result += 1
    assert vector.tolist() == [1.0, 2.0]


def test_mean_leaves_its_arguments_alone() -> None:
    given_vectors = vectors(3, 4, seed=1)
    before = [vector.clone() for vector in given_vectors]
    mean(given_vectors)
    assert all(
        torch.equal(vector, kept) for vector, kept in zip(given_vectors, before, strict=True)
    )


def test_mean_adds_in_the_order_given() -> None:
    big, small, minus = torch.tensor([1e8]), torch.tensor([3.0]), torch.tensor([-1e8])
    assert mean([big, minus, small]).item() == 1.0
    assert mean([big, small, minus]).item() == 0.0  # fp32 near 1e8 counts in eights


def test_the_bits_of_a_mean_do_not_depend_on_who_computes_it() -> None:
    """A node's own vector is an object of its own and lies elsewhere in memory; those of the others
    came as one piece.
    """
    sent = torch.randn(3, 1001, generator=torch.Generator().manual_seed(2))
    results = []
    for me in range(3):
        backing = torch.empty(1001 + me)
        mine = backing[me:].copy_(sent[me])  # another alignment on each node
        results.append(mean([mine if j == me else sent[j] for j in range(3)]))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


# Nesterov


@pytest.mark.parametrize(("lr", "momentum"), [(0.7, 0.9), (0.3, 0.5), (1.0, 0.99)])
def test_nesterov_is_torchs(lr: float, momentum: float) -> None:
    theta, gradients = vectors(1, 6, seed=3)[0], vectors(200, 6, seed=4)
    expected = torch_sgd(theta, gradients, lr, momentum)
    rule = nesterov(lr, momentum, parameters=6)
    for gradient, after in zip(gradients, expected, strict=True):
        rule.step(theta, gradient)
        torch.testing.assert_close(theta, after, rtol=1e-5, atol=1e-4)


def test_delayed_nesterov_with_a_buffer_of_one_is_torchs() -> None:
    theta, gradients = vectors(1, 6, seed=5)[0], vectors(200, 6, seed=6)
    expected = torch_sgd(theta, gradients, 0.3, 0.9)
    rule = delayed_nesterov(0.3, 0.9, buffer=1, parameters=6)
    for gradient, after in zip(gradients, expected, strict=True):
        rule.step(theta, gradient)
        torch.testing.assert_close(theta, after, rtol=1e-5, atol=1e-4)


def test_without_momentum_nesterov_subtracts_the_gradient() -> None:
    theta = torch.tensor([1.0, 2.0])
    nesterov(0.5, 0.0, parameters=2).step(theta, torch.tensor([4.0, -4.0]))
    assert theta.tolist() == [-1.0, 4.0]


# Delayed Nesterov


def numpy_delayed_nesterov(
    theta: np.ndarray, gradients: list[np.ndarray], *, lr: float, beta: float, n: int, c: float
) -> list[np.ndarray]:
    """The published recursion, in the words of the paper and in double precision."""
    m, total = np.zeros_like(theta), np.zeros_like(theta)
    path = []
    for t, g in enumerate(gradients):
        total = total + g
        if (t + 1) % n == 0:
            m = beta * m + total / n
            theta = theta - lr * ((1 - c * n + c) * beta * m + g / n)
            total = np.zeros_like(theta)
        else:
            theta = theta - lr * (c * beta * m + g / n)
        path.append(theta)
    return path


@given(
    buffer=st.integers(1, 6),
    part=st.floats(0, 1),
    momentum=st.floats(0, 0.95),
    lr=st.floats(0.01, 3),
    seed=st.integers(0, 1000),
)
def test_delayed_nesterov_is_the_published_recursion(
    buffer: int, part: float, momentum: float, lr: float, seed: int
) -> None:
    theta, gradients = vectors(1, 5, seed)[0], vectors(25, 5, seed + 1)
    spread = part / buffer
    expected = numpy_delayed_nesterov(
        theta.double().numpy(),
        [g.double().numpy() for g in gradients],
        lr=lr,
        beta=momentum,
        n=buffer,
        c=spread,
    )
    rule = delayed_nesterov(lr, momentum, buffer, parameters=5, spread=spread)
    for gradient, after in zip(gradients, expected, strict=True):
        rule.step(theta, gradient)
        np.testing.assert_allclose(theta.numpy(), after, rtol=1e-4, atol=1e-3)


def test_over_a_buffer_delayed_nesterov_moves_by_the_mean_gradient_and_the_momentum() -> None:
    """N equal gradients and c = 0: θ moves by lr·(g + β·m), as one Nesterov step with their
    mean.
    """
    delayed, plain = torch.zeros(3), torch.zeros(3)
    rule, reference = (
        delayed_nesterov(0.5, 0.9, buffer=4, parameters=3),
        nesterov(0.5, 0.9, parameters=3),
    )
    for gradient in vectors(5, 3, seed=7):
        for _ in range(4):
            rule.step(delayed, gradient)
        reference.step(plain, gradient)
        torch.testing.assert_close(delayed, plain)


def test_between_refreshes_there_is_no_momentum_unless_it_is_spread() -> None:
    theta = torch.zeros(1)
    rule = delayed_nesterov(1.0, 0.9, buffer=2, parameters=1)
    one = torch.ones(1)
    for _ in range(2):
        rule.step(theta, one)
    before = theta.clone()
    rule.step(theta, one)
    assert (theta - before).item() == pytest.approx(-0.5)


# Buffers of the model


def test_nesterov_takes_the_averaged_buffers_as_they_are() -> None:
    theta, rule = torch.zeros(3 + BUFFERS), nesterov(0.7, 0.9, parameters=3)
    for gradient in vectors(5, 3 + BUFFERS, seed=8):
        rule.step(theta, gradient)
        assert torch.equal(theta[3:], gradient[3:])


def test_delayed_nesterov_averages_buffers_without_momentum() -> None:
    theta, rule = torch.zeros(3 + BUFFERS), delayed_nesterov(3.2, 0.9, buffer=4, parameters=3)
    expected = np.zeros(BUFFERS)
    for gradient in vectors(20, 3 + BUFFERS, seed=9):
        rule.step(theta, gradient)
        expected += (gradient[3:].double().numpy() - expected) / 4
        np.testing.assert_allclose(theta[3:].numpy(), expected, rtol=1e-5, atol=1e-6)


def test_a_delayed_nesterov_step_never_extrapolates_a_buffer() -> None:
    """A running variance must stay between what it was and what arrived."""
    theta, rule = torch.tensor([0.0, 1.0]), delayed_nesterov(3.2, 0.9, buffer=16, parameters=1)
    for arriving in [0.01] * 200:
        rule.step(theta, torch.tensor([1.0, arriving]))
        assert arriving <= theta[1].item() <= 1.0


def test_gossip_averages_buffers_over_the_group() -> None:
    phis, gradients = vectors(3, 4 + BUFFERS, seed=10), vectors(3, 4 + BUFFERS, seed=11)
    phi, velocity = phis[0].clone(), vectors(1, 4, seed=12)[0]
    gossip(phi, velocity, gradients, phis, alpha=0.5, beta=0.7, gamma=0.7)
    np.testing.assert_allclose(
        phi[4:].numpy(), np.mean([g[4:].numpy() for g in gradients], axis=0), rtol=1e-6
    )


@pytest.mark.parametrize(
    "rule",
    [nesterov(0.5, 0.9, 3), delayed_nesterov(0.5, 0.9, 2, 3)],
    ids=["nesterov", "delayed_nesterov"],
)
def test_a_step_leaves_the_gradient_alone(rule: Nesterov | DelayedNesterov) -> None:
    gradient = torch.arange(5.0)
    for _ in range(3):
        rule.step(torch.zeros(5), gradient)
    assert torch.equal(gradient, torch.arange(5.0))


# Gossip


def numpy_gossip(
    i: int,
    phis: np.ndarray,
    thetas: np.ndarray,
    delta: np.ndarray,
    *,
    alpha: float,
    beta: float,
    gamma: float,
) -> tuple[np.ndarray, np.ndarray]:
    """(φ_i, δ_i) after a step; every symbol as in the paper, Δ = θ − φ, with the sign of the
    authors' code.
    """
    n = len(phis)
    new_delta = (
        alpha * delta
        + beta / n * sum(thetas[j] - phis[j] for j in range(n))
        - gamma * (phis[i] - sum(phis) / n)
    )
    return phis[i] + new_delta, new_delta


@given(
    n=st.integers(1, 3),
    alpha=st.floats(0, 0.95),
    beta=st.floats(0.01, 1.5),
    gamma=st.floats(0, 1.5),
    seed=st.integers(0, 1000),
)
def test_gossip_is_the_published_equation(
    n: int, alpha: float, beta: float, gamma: float, seed: int
) -> None:
    phis = vectors(n, 5, seed)
    thetas = [phi + 0.1 * step for phi, step in zip(phis, vectors(n, 5, seed + 1), strict=True)]
    velocities = vectors(n, 5, seed + 2)
    gradients = [phi - theta for phi, theta in zip(phis, thetas, strict=True)]
    stacked = np.stack([phi.double().numpy() for phi in phis])
    ends = np.stack([theta.double().numpy() for theta in thetas])
    for i in range(n):
        phi, velocity = phis[i].clone(), velocities[i].clone()
        gossip(phi, velocity, gradients, phis, alpha=alpha, beta=beta, gamma=gamma)
        expected_phi, expected_delta = numpy_gossip(
            i, stacked, ends, velocities[i].double().numpy(), alpha=alpha, beta=beta, gamma=gamma
        )
        np.testing.assert_allclose(velocity.numpy(), expected_delta, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(phi.numpy(), expected_phi, rtol=1e-4, atol=1e-5)


def test_a_group_of_one_steps_alone() -> None:
    phi, velocity = torch.tensor([2.0]), torch.tensor([1.0])
    gossip(
        phi, velocity, [torch.tensor([0.5])], [torch.tensor([2.0])], alpha=0.5, beta=0.75, gamma=0.7
    )
    assert velocity.item() == 0.5 * 1.0 - 0.75 * 0.5
    assert phi.item() == 2.0 + velocity.item()


def test_gossip_may_be_given_my_own_weights_as_one_of_the_group() -> None:
    phis = vectors(2, 5, seed=13)
    expected, gradients = phis[0].clone(), vectors(2, 5, seed=14)
    gossip(
        expected,
        torch.zeros(5),
        gradients,
        [phis[0].clone(), phis[1]],
        alpha=0.5,
        beta=0.7,
        gamma=0.7,
    )
    gossip(phis[0], torch.zeros(5), gradients, phis, alpha=0.5, beta=0.7, gamma=0.7)
    assert torch.equal(phis[0], expected)


def quadratic_after(outer_steps: int, beta: float) -> float:
    """φ²/2 of a pair on the loss θ²/2, from φ = 1 and φ = 0.5, three steps of gradient descent
    before each outer step.
    """
    phis, velocities = [torch.tensor([1.0]), torch.tensor([0.5])], [torch.zeros(1), torch.zeros(1)]
    for _ in range(outer_steps):
        gradients = [phi - phi * (1 - 0.1) ** 3 for phi in phis]
        before = [phi.clone() for phi in phis]
        for phi, velocity in zip(phis, velocities, strict=True):
            gossip(phi, velocity, gradients, before, alpha=0.5, beta=beta, gamma=0.7)
    return sum(float(phi**2) for phi in phis) / 4


def test_gossip_goes_down_a_quadratic() -> None:
    assert quadratic_after(30, beta=0.7) < 1e-3 * quadratic_after(0, beta=0.7)


def test_the_printed_sign_would_go_up() -> None:
    assert quadratic_after(30, beta=-0.7) > 1e3 * quadratic_after(0, beta=-0.7)


def test_equal_replicas_stay_equal_to_the_bit() -> None:
    start = vectors(1, 1001, seed=15)[0]
    phis, velocities = [start.clone(), start.clone()], [torch.zeros(1001), torch.zeros(1001)]
    for gradient in vectors(10, 1001, seed=16):
        before = [phi.clone() for phi in phis]
        for phi, velocity in zip(phis, velocities, strict=True):
            gossip(
                phi, velocity, [gradient, gradient.clone()], before, alpha=0.5, beta=0.7, gamma=0.7
            )
    assert torch.equal(phis[0], phis[1])
    assert torch.equal(velocities[0], velocities[1])


def test_equal_replicas_step_as_one_alone() -> None:
    """Averaging equals changes nothing: a pair of equal replicas is one replica."""
    start, gradients = vectors(1, 101, seed=17)[0], vectors(10, 101, seed=18)
    ends = []
    for n in (1, 2):
        phi, velocity = start.clone(), torch.zeros(101)
        for gradient in gradients:
            gossip(phi, velocity, [gradient] * n, [phi.clone()] * n, alpha=0.5, beta=0.7, gamma=0.7)
        ends.append(phi)
    assert torch.equal(*ends)


def test_with_gamma_one_and_nothing_else_gossip_is_averaging() -> None:
    phis = vectors(3, 5, seed=19)
    phi = phis[0].clone()
    gossip(phi, torch.zeros(5), [torch.zeros(5)] * 3, phis, alpha=0.0, beta=0.7, gamma=1.0)
    torch.testing.assert_close(phi, torch.stack(phis).mean(dim=0))
