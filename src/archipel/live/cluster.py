"""A Ray cluster: which machines it has, where nodes belong on them, and whether strangers are kept
out.

What belongs here: sessions, machines, places, protection. What does not: what runs there
(`ray_host.py`).
"""

from __future__ import annotations

import ipaddress
import logging
import os
import secrets
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from archipel.actor import NodeId
from archipel.errors import TrainingError, UserError

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
try:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError:
    raise UserError(
        "live runs need Ray, which is not installed; install it with: pip install 'archipel[live]'"
    ) from None

REGION = "region"
"""The label of a Ray node that says which region of the topology it belongs to."""
CONNECT_S = 10.0
"""A cluster's head that has not answered by then is not there."""
HEAD = "node:__internal_head__"
"""The resource that Ray gives the head's node, and no other."""


# Places


@dataclass(frozen=True)
class Machine:
    """A Ray node: its id and address, the region that its label names, and its GPUs."""

    id: str
    address: str
    region: str | None
    gpus: float


def machines() -> list[Machine]:
    """Those of the cluster that are alive."""
    return [
        Machine(
            node["NodeID"],
            node["NodeManagerAddress"],
            node["Labels"].get(REGION),
            node["Resources"].get("GPU", 0.0),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def head() -> Machine:
    """The one whose Ray node began the cluster, and keeps what all others share."""
    ids = [node["NodeID"] for node in ray.nodes() if HEAD in node["Resources"]]
    return next(machine for machine in machines() if machine.id in ids)


def place(
    nodes: Sequence[NodeId],
    workers: Sequence[NodeId],
    found: Sequence[Machine],
    gpu_fraction: float,
    head: str | None,
) -> dict[NodeId, Machine]:
    """The machine of each node: its workers spread evenly over a region's machines, everything else
    on the region's first.

    Where machines have GPUs, only those take workers, each as many as `gpu_fraction` allows.

    Args:
        head: the cluster's address, for the advice; None: one private machine acts all regions.

    Raises:
        UserError: a region has no machine, or too few GPUs; it names who is left without.
    """
    places: dict[NodeId, Machine] = {}
    load: dict[str, int] = dict.fromkeys((machine.id for machine in found), 0)
    for region in dict.fromkeys(node.region for node in nodes):
        here = [machine for machine in found if head is None or machine.region == region]
        members = [node for node in nodes if node.region == region]
        if not here:
            seen = (
                ", ".join(sorted({repr(machine.region) for machine in found if machine.region}))
                or "none"
            )
            raise UserError(
                f"region {region!r} has no machine for {listed(members)}: no Ray node has the "
                f"label {REGION}={region} (labels "
                f"found: {seen}); on a machine of that region: ray start --address={head} "
                f"--labels={REGION}={region}"
            )
        slots = {machine.id: int(machine.gpus / gpu_fraction + 1e-9) for machine in here}
        with_gpus = any(slots.values())
        for node in members:
            if node not in workers:
                places[node] = here[0]
                continue
            free = [
                machine for machine in here if not with_gpus or load[machine.id] < slots[machine.id]
            ]
            if not free:
                missing = [
                    worker for worker in members if worker in workers and worker not in places
                ]
                raise UserError(
                    f"region {region!r} has GPUs for {sum(slots.values())} workers, and none for "
                    f"{listed(missing)}: "
                    f"live.gpu_fraction = {gpu_fraction:g} of a GPU each; lower it, or add a "
                    "machine"
                )
            places[node] = min(free, key=lambda machine: load[machine.id])
            load[places[node].id] += 1
    return places


def listed(nodes: Sequence[NodeId]) -> str:
    """The first few of them, for a message."""
    more = f" and {len(nodes) - 4} more" if len(nodes) > 4 else ""
    return ", ".join(map(str, nodes[:4])) + more


# Sessions


TOKEN = secrets.token_hex(32)
"""Of private clusters: Ray listens on all interfaces even so, and without it anybody who can reach
this machine could join.
"""


@contextmanager
def session(address: str | None) -> Iterator[None]:
    """A connection to the Ray cluster at `address`, or to a private one that ends with this; not if
    there is one already.

    Raises:
        UserError: there is no cluster at `address`, or it does not let us in.
        TrainingError: a private one did not start.
    """
    if ray.is_initialized():
        yield
        return
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    before = {key: os.environ.get(key) for key in ("RAY_AUTH_TOKEN", "RAY_AUTH_MODE")}
    try:
        if address is None:
            if before["RAY_AUTH_MODE"] is None:
                os.environ["RAY_AUTH_TOKEN"] = (
                    TOKEN  # Ray then asks for it, and leaves no token in the user's home
                )
            # Ray makes its workers nice to others, by 15, unless it is told not to.
            try:
                ray.init(
                    address="local",
                    include_dashboard=False,
                    _system_config={"worker_niceness": 0},
                    **quiet,
                )
            # Ray raises all kinds, and gives up after 30 s on a machine that is very busy.
            except Exception as error:
                raise TrainingError(
                    f"Ray did not start: {' '.join(str(error).split())[:400]}"
                ) from None
        else:
            _check_reachable(address)
            try:
                ray.init(address=address, **quiet)
            except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
                reason = " ".join(str(error).split())[:400]
                raise UserError(
                    f"--address {address}: cannot join a Ray cluster there, with the RAY_AUTH_… "
                    "and RAY_TLS_… settings of this "
                    f"environment: {reason}"
                ) from None
        yield
    finally:
        ray.shutdown()
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


def _check_reachable(address: str) -> None:
    """Raise a `UserError` if nobody listens at an address HOST:PORT, where Ray itself would go on
    trying for minutes. Others, such as `auto`, are Ray's to judge.
    """
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "/" not in host:
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(
                f"--address {address}: no Ray cluster answers there: {reason}"
            ) from None


def check_protected(found: Sequence[Machine]) -> None:
    """Raise a `UserError` if a machine of the cluster, unless all are on loopback, lets strangers
    in or sends in the clear.

    Each machine is asked itself: what counts is the environment that its Ray was started in.
    """
    if all(ipaddress.ip_address(machine.address).is_loopback for machine in found):
        return
    asked = [protection.options(scheduling_strategy=on(machine)).remote() for machine in found]
    for machine, (token, tls) in zip(found, ray.get(asked, timeout=60), strict=True):
        lacks = [
            text
            for text, there in (
                ("token (RAY_AUTH_MODE=token)", token),
                ("encryption (RAY_USE_TLS=1)", tls),
            )
            if not there
        ]
        if lacks:
            raise UserError(
                f"the Ray node on {machine.address} runs without {' and without '.join(lacks)}: "
                "whoever can reach it could read, "
                "change or run anything; see docs/security.md, or give --insecure if nobody else "
                "can reach it"
            )


@ray.remote(num_cpus=0, max_retries=0)
def protection() -> tuple[bool, bool]:
    """Whether the Ray node that runs this asks for a token, and whether it encrypts."""
    environment = {key: os.environ.get(key, "").lower() for key in ("RAY_AUTH_MODE", "RAY_USE_TLS")}
    return environment["RAY_AUTH_MODE"] == "token", environment["RAY_USE_TLS"] in ("1", "true")


def on(machine: Machine) -> Any:
    """Ray's word for: there and nowhere else."""
    return NodeAffinitySchedulingStrategy(machine.id, soft=False)
