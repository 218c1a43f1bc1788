"""Measuring a cluster: what its links carry, and how long its machines take for an inner step.

What belongs here: the measurements, and the topology that they make. What does not: transfers
(`transport/`), what a run does on that topology (`simulation.py`), and how a live run compares
(`fidelity.py`).

Links are measured by the transport that carries the messages of a run. The receiver notes on its
own clock when each of many messages was there, which follow each other closely; how fast they came
is the slope of the line through them. One pair of regions is measured at a time. Inner steps are
measured on all workers at the same time, for they may share machines.
"""

from __future__ import annotations

import itertools
import math
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch

from archipel.actor import NodeId
from archipel.errors import TrainingError, UserError
from archipel.live.cluster import Machine, check_protected, machines, on, place, session
from archipel.live.compute import device
from archipel.live.line import LineSetup
from archipel.live.prepare import shards
from archipel.live.ray_host import line_of
from archipel.recipe import Recipe
from archipel.sim.topology import RegionLink, Topology
from archipel.train.configs import NoTask, TaskConfig
from archipel.train.data import Shard
from archipel.train.pool_process import median_step_time_s
from archipel.train.replica import Replica, Run
from archipel.train.task import make_task
from archipel.transport.frames import Address
from archipel.transport.keys import Keys
from archipel.transport.transport import Transport

PINGS = 20
MESSAGES = 64
"""Follow each other over a link."""
FIRST_BYTES = 1 << 18
"""Of those together by which it is guessed how much the link passes in a while."""
MOST_BYTES = 1 << 28
OVERHEAD = 0.047
"""Headers of Ethernet, IP and TCP with time stamps in packets of 1,500 bytes (66 on 1,448), of TLS
(22 on 16,384) and of our frames. A link with other packets has another part of it, but messages
take as long: `Measured.gbit_s` has it too.
"""
ANSWER_S = 120.0
"""Longest wait for an answer."""


@dataclass(frozen=True)
class Measured:
    """A link between two regions.

    Attributes:
        there_bytes_per_s, back_bytes_per_s: of messages, one direction at a time.
        both_bytes_per_s: there and back at the same time.
        round_trip_s: median of some small messages and their answers.
        jitter: standard deviation of the logarithm of those.
    """

    there_bytes_per_s: float
    back_bytes_per_s: float
    both_bytes_per_s: tuple[float, float]
    round_trip_s: float
    jitter: float

    @property
    def gbit_s(self) -> float:
        """Bandwidth with all headers, of the slower direction."""
        slower = min(self.there_bytes_per_s, self.back_bytes_per_s)
        return slower * (1 + OVERHEAD) * 8 / 1e9


@dataclass(frozen=True)
class Probed:
    """What was measured.

    Attributes:
        links: by pair of regions.
        step_times_s: of one inner step of each worker; empty where that is not measured.
    """

    links: Mapping[tuple[str, str], Measured]
    step_times_s: Mapping[NodeId, float]

    def step_time_s(self, recipe: Recipe) -> float:
        """Of the fastest worker; the profile's where it is not measured."""
        if self.step_times_s:
            return min(self.step_times_s.values())
        assert recipe.profile is not None
        return recipe.profile.step_time_s

    def topology(self, recipe: Recipe) -> Topology:
        """The recipe's topology with what was measured in the place of what was assumed."""
        links = [
            RegionLink(
                between=between,
                bandwidth_gbit_s=_rounded(link.gbit_s),
                latency_ms=_rounded(link.round_trip_s / 2 * 1e3),
                jitter=_rounded(link.jitter) if link.jitter >= 0.1 else 0.0,
                overhead=OVERHEAD,
            )
            for between, link in self.links.items()
        ]
        regions = dict(recipe.topology.regions)
        if self.step_times_s:
            fastest_s = min(self.step_times_s.values())
            speeds = {node: fastest_s / each for node, each in self.step_times_s.items()}
            regions = {
                region: [
                    _rounded(speeds[worker.id])
                    for worker in recipe.topology.workers
                    if worker.id.region == region
                ]
                for region in regions
            }
        return Topology(
            name="probed",
            regions=regions,
            local=recipe.topology.local,
            links=links,
            sharing="fair",
            collective="chain",
        )


def probe(
    recipe: Recipe,
    *,
    address: str | None = None,
    insecure: bool = False,
    seconds: float = 4.0,
    progress: Callable[[str], None] = lambda _: None,
) -> Probed:
    """Measure the links between the recipe's regions, and its inner steps, on a cluster.

    With `live.pace: profile` inner steps are not measured: a live run then acts out the profile's.

    Args:
        address, insecure: as for `launch`.
        seconds: about so long each link is filled, three times.
        progress: is told what is being measured.

    Raises:
        UserError: a region has no machine, the cluster is not protected, or the task fails.
        TrainingError: a measurement does not come to an end.
    """
    with session(address):
        found = machines()
        if address is not None and not insecure:
            check_protected(found)
        workers = [worker.id for worker in recipe.topology.workers]
        gpus = recipe.live.gpu_fraction * recipe.live.processes
        places = place(workers, workers, found, gpus, address)
        links = _links(recipe, places, seconds, progress)
        steps: dict[NodeId, float] = {}
        if not recipe.acts_out_profile and not isinstance(recipe.task, NoTask):
            progress(f"inner steps of {len(workers)} workers at the same time")
            steps = _step_times(recipe, places)
    return Probed(links, steps)


def _links(
    recipe: Recipe,
    places: Mapping[NodeId, Machine],
    seconds: float,
    progress: Callable[[str], None],
) -> dict[tuple[str, str], Measured]:
    keys = Keys.make()
    first: dict[str, Machine] = {}
    for node, machine in places.items():
        first.setdefault(node.region, machine)
    ends = {
        region: RayEnd.options(scheduling_strategy=on(machine)).remote(
            line_of(recipe, machine, keys)
        )
        for region, machine in first.items()
    }
    links = {}
    try:
        for a, b in itertools.combinations(
            [region for region in recipe.topology.regions if region in ends], 2
        ):
            if recipe.topology.link(a, b) is None:
                continue
            progress(f"{a} and {b}")
            links[a, b] = _measure(ends[a], ends[b], seconds, f"between {a} and {b}")
    finally:
        for end in ends.values():
            ray.kill(end)
    return links


def _measure(a: Any, b: Any, seconds: float, where: str) -> Measured:
    """One link, from both of its ends."""
    to_a, to_b = _get([a.address.remote(), b.address.remote()], where)
    (trips,) = _get([a.ping.remote(to_b, PINGS)], where)
    guess = [
        _get([end.push.remote(to, FIRST_BYTES)], where)[0] for end, to in ((a, to_b), (b, to_a))
    ]
    sizes = [round(min(MOST_BYTES, max(FIRST_BYTES, rate * seconds))) for rate in guess]
    (there,) = _get([a.push.remote(to_b, sizes[0])], where)
    (back,) = _get([b.push.remote(to_a, sizes[1])], where)
    both = _get([a.push.remote(to_b, sizes[0]), b.push.remote(to_a, sizes[1])], where)
    logarithms = [math.log(trip) for trip in trips]
    return Measured(
        there,
        back,
        (both[0], both[1]),
        statistics.median(trips),
        statistics.stdev(logarithms),
    )


def _step_times(recipe: Recipe, places: Mapping[NodeId, Machine]) -> dict[NodeId, float]:
    run, data = Run(1000, recipe.replicas, recipe.run.seed), shards(recipe)
    timers = {
        node: Timer.options(  # type: ignore[attr-defined]
            scheduling_strategy=on(machine),
            num_gpus=recipe.live.gpu_fraction if machine.gpus else 0,
        ).remote(recipe.task, run, data[node])
        for node, machine in places.items()
    }
    try:
        where = "of inner steps"
        _get([timer.ready.remote() for timer in timers.values()], where)
        times = _get([timer.measure.remote() for timer in timers.values()], where)
        return dict(zip(timers, times, strict=True))
    finally:
        for timer in timers.values():
            ray.kill(timer)


def _get(answers: list[Any], where: str) -> list[Any]:
    try:
        return list(ray.get(answers, timeout=ANSWER_S))
    except ray.exceptions.GetTimeoutError:
        raise TrainingError(f"the measurement {where} gave nothing in {ANSWER_S:g} s") from None
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, UserError | TrainingError):
            raise error.cause from None
        raise TrainingError(f"the measurement {where} failed: {error.cause!r}") from None
    except ray.exceptions.RayError as error:
        text = " ".join(str(error).split())[:200]
        raise TrainingError(f"the measurement {where} failed: {text}") from None


class End:
    """One region's end of all links. A message that comes is answered by the time at which it was
    there, on the receiver's clock.
    """

    def __init__(self, line: LineSetup) -> None:
        self.transport = Transport(
            line.keys, line.machine, deliver=self._take, ports=line.ports, failed=self._failed
        )
        self.answers: dict[str, float] = {}
        self.changed = threading.Condition()
        self.count = itertools.count()
        self.trouble: str | None = None

    def address(self) -> Address:
        return self.transport.address

    def ping(self, to: Address, times: int) -> list[float]:
        """Round trips of some small messages, after two more that open the connections."""
        trips = []
        for _ in range(times + 2):
            start = time.perf_counter()
            self._wait([self._send(to, b"")])
            trips.append(time.perf_counter() - start)
        return trips[2:]

    def push(self, to: Address, size_bytes: int) -> float:
        """Bytes a second of messages that follow each other over the link."""
        body = np.random.default_rng(0).bytes(max(1, size_bytes // MESSAGES))
        times = self._wait([self._send(to, body) for _ in range(MESSAGES)])
        return len(body) * rate(times)

    def _send(self, to: Address, body: bytes) -> str:
        number = f"{self.transport.address} {next(self.count)}"
        self.transport.send(to, [f"? {number}".encode(), body])
        return number

    def _wait(self, numbers: list[str]) -> list[float]:
        with self.changed:
            there = self.changed.wait_for(
                lambda: self.trouble or all(number in self.answers for number in numbers), ANSWER_S
            )
            if self.trouble or not there:
                raise TrainingError(self.trouble or f"no answer in {ANSWER_S:g} s")
            return [self.answers.pop(number) for number in numbers]

    def _take(self, sender: Address, parts: list[memoryview]) -> None:
        now_s, head = time.perf_counter(), bytes(parts[0]).decode()
        if head.startswith("? "):
            self.transport.send(sender, [f"! {now_s!r} {head[2:]}".encode()])
            return
        _, at_s, number = head.split(" ", 2)
        with self.changed:
            self.answers[number] = float(at_s)
            self.changed.notify_all()

    def _failed(self, to: Address, why: str) -> None:
        with self.changed:
            self.trouble = f"{to}: {why}"
            self.changed.notify_all()


RayEnd: Any = ray.remote(num_cpus=0, max_restarts=0)(End)


@ray.remote(num_cpus=0, max_restarts=0)
class Timer:
    """Takes inner steps of a worker that is thrown away."""

    def __init__(self, config: TaskConfig, run: Run, shard: Shard) -> None:
        torch.set_num_threads(1)
        self.replica, self.shard = Replica(make_task(config), run, device()), shard

    def ready(self) -> None:
        """The replica is there."""

    def measure(self) -> float:
        return median_step_time_s(self.replica, self.shard)


def rate(times: Sequence[float]) -> float:
    """How many of a series of events there are in a second: the slope of the line through all but
    the first quarter of them, in which a connection finds its pace.
    """
    steady = np.array(times[len(times) // 4 :])
    return 1 / float(np.polyfit(np.arange(len(steady)), steady, 1)[0])


def _rounded(value: float) -> float:
    """Four digits: more is noise."""
    return float(f"{value:.4g}")
