"""The end of a live run: all are saved if it was interrupted, the last losses come, all stop.

What belongs here: what is waited for when a run is over, and for how long. What does not: when it
is over (`course.py`, `watch.py`), and the files that it leaves (`launch.py`).

No wait here has a fixed limit: a large save, a long evaluation or a slow link may take as long as
it needs. A wait ends early only when a host does not answer any more.
"""

from __future__ import annotations

import time
import warnings

from archipel.actor import NodeId
from archipel.live.cluster import listed
from archipel.live.fleet import Died
from archipel.live.protocol import Record
from archipel.live.watch import Watch

TICK_S = 0.02
"""How often hosts are asked for what is waited for."""


def save_all(watch: Watch) -> None:
    """Have all hosts saved before an interrupted run is stopped, and warn of those that cannot be:
    they have died, or have not ended their inner steps within the deadline.

    Raises:
        UserError, TrainingError: a save cannot be written.
    """
    if watch.schedule.every is None:
        return
    watch.save_hosts()
    waits_since_s = dict.fromkeys(watch.fleet.waiting("save"), time.monotonic())
    late: list[NodeId] = []
    while waiting := watch.fleet.waiting("save") - set(late):
        for reply in watch.fleet.replies(TICK_S, "save"):
            if isinstance(reply.value, Exception) and not isinstance(reply.value, Died):
                raise reply.value
        watch.ask(waiting)
        for node in waiting:
            status = watch.health.statuses.get(node)
            if status is not None and status.saving:  # however long it takes
                waits_since_s[node] = time.monotonic()
            elif time.monotonic() - waits_since_s[node] > watch.deadline_s:
                late.append(node)
    if late:
        warnings.warn(
            f"{listed(late)} had not ended its inner steps after {watch.deadline_s:g} s, and is "
            "not saved",
            stacklevel=2,
        )
    watch.save()


def close(watch: Watch) -> list[Record]:
    """Stop all hosts, and wait for the losses that they are computing; what each leaves. A host
    that dies meanwhile leaves nothing.

    Raises:
        UserError, TrainingError: a host has failed, or a loss could not be computed.
        Diverged: a loss is not finite.
    """
    running, records = watch.fleet.waiting("run"), list[Record]()
    for node in running:
        watch.fleet.stop(node)
    while watch.fleet.waiting("run") or watch.course.evaluations.pending:
        for reply in watch.fleet.replies(TICK_S, "run"):
            match reply.value:
                case Record() as record:
                    records.append(record)
                case Died() as error:
                    _drop(watch, reply.node, watch.death(reply.node, error))
                case Exception() as error:
                    raise error
        running = {node for node in running if node in watch.fleet.hosts}
        watch.ask(running)
        for node in running:
            if watch.health.silence_s(node, watch.now) > watch.deadline_s:
                _drop(watch, node, watch.death(node, None))
        watch.course.evaluations.collect()
    return records


def _drop(watch: Watch, node: NodeId, why: str) -> None:
    warnings.warn(f"{why}; it died while the run was ended", stacklevel=2)
    watch.drop(node)
