"""HALoS (Kim et al., arXiv 2506.04531, ICML 2025): workers talk to a server in their region,
regional servers to a global one.

- A **worker** gets θ from its local server, takes its H inner steps, sends the displacement, gets
  the newest θ.
- A **local server** applies each displacement at once and answers at once: no worker ever waits for
  a slow link between regions. When it has applied K of them since its last merge, it sends their
  sum to the global server.
- The **global server** applies that and answers with the new global model.
- Upon that model a local server blends it into its own: θ ← (1 − w)·θ + w·Θ.

Both kinds of server use delayed Nesterov momentum. Exactly one report of a local server is in
flight at a time.

Deviation, if asked for: the updates that a local server applies while its report is in flight are
kept in its own model but are part of no report, in the authors' code and with `report_since:
merge`. The paper can be read otherwise; with `report_since: send` the next report starts where the
last one ended (the merge then moves the starting point by as much as it moves the model). So a
report carries two counts of inner steps: those that have been trained, which the plan and the
learning rate follow, and those that are in its displacement, which the global model absorbs.

When something is lost: a report that is lost is not sent again, for nobody knows whether it was
applied. A server that is there again sends its model to all that it serves, and a local server
blends it in like an answer. A local server that restarts begins a new report, since its save may
hold updates that it has reported already. A report that is refused is answered like any other: what
was in it is in the local model alone.

Defaults are those that the authors chose by sweep on a 70M model, with the paper's H = 32; their
example script has H = 8. The learning rates are 0.15 · 2 and 0.2 · 16: their scripts multiply by
the buffer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from archipel.actor import (
    Actor,
    Context,
    Joined,
    Message,
    MethodConfig,
    NodeId,
    Refused,
    Start,
    Update,
    Vector,
    World,
)
from archipel.outer import DelayedNesterov, delayed_nesterov
from archipel.parameter_server import Delta, Model, Worker
from archipel.vector import outer_gradient


class Config(MethodConfig):
    """HALoS' settings."""

    inner_steps: int = Field(
        32, ge=1, description="H: inner steps of the fastest worker between two exchanges"
    )
    dynamic_steps: bool = Field(
        True, description="slower workers take fewer inner steps, so that all finish together"
    )
    accumulate: int = Field(
        32, ge=1, description="K: worker updates that a local server applies before it reports"
    )
    merge_weight: float = Field(
        0.25,
        ge=0,
        le=1,
        description="weight of the arriving global model at a local server; 1 overwrites",
    )
    report_since: Literal["merge", "send"] = Field(
        "merge", description="where a report's displacement starts"
    )
    local_lr: float = Field(
        3.2,
        gt=0,
        description="learning rate of local servers; one arrival moves by local_lr / local_buffer",
    )
    local_momentum: float = Field(0.9, ge=0, lt=1, description="β_l: momentum of local servers")
    local_buffer: int = Field(
        16, ge=1, description="arrivals between two refreshes of a local server's momentum"
    )
    global_lr: float = Field(
        0.3,
        gt=0,
        description="learning rate of the global server; one arrival moves by global_lr / "
        "global_buffer",
    )
    global_momentum: float = Field(
        0.5, ge=0, lt=1, description="β_g: momentum of the global server"
    )
    global_buffer: int = Field(
        2, ge=1, description="arrivals between two refreshes of the global server's momentum"
    )
    workers_per_server: int | None = Field(
        None, ge=1, description="workers of a region under one local server; null: all of them"
    )


@dataclass(frozen=True, eq=False, slots=True)
class Report(Update):
    """From a local server to the global one, which answers with a `Model`, also if it is `Refused`.

    Attributes:
        absorbed: inner steps whose displacement is in `gradient`.
        trained: inner steps applied at the local server since its last report; with `report_since:
            merge` some of them are in no report's `gradient`.
    """

    absorbed: int
    trained: int


@dataclass(kw_only=True)
class LocalServer(Actor):
    """A regional server.

    Attributes:
        base: where the next report's displacement starts.
        merged_at: `local_updates` at the last merge.
        progress: the common progress that the global server told last.
        unreported: inner steps applied here that the global server has not been told of.
        in_flight: inner steps that the report on its way tells of. The best guess at the common
            progress is `progress + in_flight + unreported`.
        displaced: inner steps that have moved `theta` away from `base`.
    """

    config: Config
    theta: Vector
    base: Vector
    outer: DelayedNesterov
    workers: tuple[NodeId, ...]
    global_server: NodeId
    merged_at: int = 0
    progress: int = 0
    unreported: int = 0
    in_flight: int = 0
    displaced: int = 0

    def upon(self, message: Message, sender: NodeId, ctx: Context) -> None:
        match message:
            case Start():
                self.answer(self.workers, ctx)
            case Delta(
                gradient=gradient, steps=steps
            ):  # from a worker: apply at once, answer at once
                self.outer.step(self.theta, gradient)
                self.local_updates += 1
                self.unreported += steps
                self.displaced += steps
                if self.local_updates == self.merged_at + self.config.accumulate:
                    self.report(ctx)
                self.answer((sender,), ctx)
            case Refused():
                self.answer((sender,), ctx)
            case Model(
                theta=theta, progress=progress
            ):  # from the global server: blend, do not overwrite
                self.merge(theta)
                self.progress, self.in_flight = progress, 0
            case Joined(node=self.me):
                self.base, self.merged_at = self.theta.clone(), self.local_updates
                self.unreported = self.in_flight = self.displaced = 0
                self.answer(self.workers, ctx)
            case Joined(node=worker) if worker in self.workers:
                self.answer((worker,), ctx)

    def answer(self, workers: Iterable[NodeId], ctx: Context) -> None:
        for worker in workers:
            ctx.send(
                worker, Model(self.theta.clone(), self.progress + self.in_flight + self.unreported)
            )

    def report(self, ctx: Context) -> None:
        gradient = outer_gradient(self.base, self.theta, self.outer.velocity.numel())
        ctx.send(self.global_server, Report(gradient, self.displaced, self.unreported))
        self.in_flight, self.unreported = self.unreported, 0
        if self.config.report_since == "send":
            self.base, self.displaced = self.theta.clone(), 0

    def merge(self, theta: Vector) -> None:
        before = self.theta.clone()
        self.theta.lerp_(theta, self.config.merge_weight)
        if self.in_flight and self.config.report_since == "merge":
            self.base, self.displaced = self.theta.clone(), 0
        else:  # also if this is no answer, so that nothing is left out of the next report
            self.base += self.theta - before
        if self.in_flight:
            self.merged_at = self.local_updates

    def peers(self) -> Iterable[NodeId]:
        return (*self.workers, self.global_server)

    def waits_for(self) -> str:
        return f"a displacement from a worker, or a model from {self.global_server}"


@dataclass(kw_only=True)
class GlobalServer(Actor):
    """Holds the model that a user takes home. `trained` are the inner steps that it has been told
    of, `absorbed` those whose displacements it has applied.
    """

    theta: Vector
    outer: DelayedNesterov
    local_servers: tuple[NodeId, ...]
    trained: int = 0

    def upon(self, message: Message, sender: NodeId, ctx: Context) -> None:
        match message:
            case Report(gradient=gradient, absorbed=absorbed, trained=trained):
                self.outer.step(self.theta, gradient)
                self.outer_steps += 1
                self.absorbed += absorbed
                self.trained += trained
                ctx.send(sender, Model(self.theta.clone(), self.trained))
            case Refused():
                ctx.send(sender, Model(self.theta.clone(), self.trained))
            case Joined(node=self.me):
                for server in self.local_servers:
                    ctx.send(server, Model(self.theta.clone(), self.trained))
            case Joined(node=server):
                ctx.send(server, Model(self.theta.clone(), self.trained))

    def model(self) -> Vector:
        return self.theta

    def peers(self) -> Iterable[NodeId]:
        return self.local_servers

    def waits_for(self) -> str:
        return "a report from any local server"


def build(config: Config, world: World, theta: Vector) -> list[Actor]:
    """The global server in the first region, the local servers of every region, and one actor a
    worker.
    """
    steps = world.inner_steps(config.inner_steps, dynamic=config.dynamic_steps)

    def delayed(lr: float, momentum: float, buffer: int) -> DelayedNesterov:
        return delayed_nesterov(lr, momentum, buffer, world.parameters)

    local_servers: list[LocalServer] = []
    workers: list[Worker] = []
    global_id = NodeId(world.regions[0], "global")
    for region in world.regions:
        members = [me for me in steps if me.region == region]
        size = config.workers_per_server or len(members)
        for first in range(0, len(members), size):
            group = tuple(members[first : first + size])
            server = LocalServer(
                me=NodeId(region, f"server{first // size}"),
                config=config,
                theta=theta.clone(),
                base=theta.clone(),
                outer=delayed(config.local_lr, config.local_momentum, config.local_buffer),
                workers=group,
                global_server=global_id,
            )
            local_servers.append(server)
            workers += [
                Worker(me=me, server=server.me, steps=steps[me], parameters=world.parameters)
                for me in group
            ]
    global_server = GlobalServer(
        me=global_id,
        theta=theta.clone(),
        outer=delayed(config.global_lr, config.global_momentum, config.global_buffer),
        local_servers=tuple(server.me for server in local_servers),
    )
    return [global_server, *local_servers, *workers]
