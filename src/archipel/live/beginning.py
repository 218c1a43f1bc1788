"""The beginning of a live run: all hosts are made, find each other, and are up.

What belongs here: what is done once, before the first host runs. What does not: how a host that was
lost is started again (`watch.py`).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping

from archipel.actor import NodeId
from archipel.errors import TrainingError, UserError
from archipel.live.cluster import listed
from archipel.live.fleet import Died
from archipel.live.meeting import Meeting
from archipel.live.protocol import NeedsWeights
from archipel.live.ray_host import ask_for_port
from archipel.live.watch import START_S, Watch
from archipel.train.pipeline import Pipeline


def start(watch: Watch, meetings: Mapping[NodeId, Meeting]) -> None:
    """Make all hosts, and wait until they are up.

    Args:
        meetings: where those meet that hold the stages of a model.

    Raises:
        UserError, TrainingError: one has failed, or is not up in time.
    """
    fleet = watch.fleet
    for node, setup in watch.setups.items():
        fleet.make(node, setup)
    for node, setup in watch.setups.items():
        fleet.connect(setup, node, meetings.get(node))
    while late := fleet.waiting("connect"):
        replies = fleet.replies(START_S, "connect")
        if not replies:
            raise TrainingError(f"{listed(sorted(late))} did not start within {START_S:g} s")
        for reply in replies:
            match reply.value:
                case Died() as error:
                    raise TrainingError(watch.death(reply.node, error))
                case Exception() as error:
                    raise error
                case NeedsWeights():
                    fleet.give_weights(reply.node)
                case ready:
                    watch.hear_ready(reply.node, ready)


def meetings_of(
    watch: Watch, pipeline: Pipeline | None, *, insecure: bool
) -> dict[NodeId, Meeting]:
    """Where the stages of a model meet; nowhere if there are none, or nothing is trained.

    Raises:
        UserError: on several machines they would meet over a network where anybody could listen.
    """
    workers = [node for node, setup in watch.setups.items() if setup.trains]
    if pipeline is None or not workers:
        return {}
    places = watch.fleet.places
    here = {places[worker].id for worker in workers}
    where = watch.fleet.meeting_file()
    if len(here) > 1:
        addresses = [ipaddress.ip_address(places[worker].address) for worker in workers]
        if not insecure and not all(address.is_loopback for address in addresses):
            raise UserError(
                f"pipeline.stages = {pipeline.stages}: stages on {len(here)} machines send "
                "activations over torch.distributed, which neither encrypts nor asks who is there; "
                "see docs/security.md, or give --insecure if nobody else can reach it"
            )
        where = f"tcp://{places[workers[0]].address}:{ask_for_port(places[workers[0]])}"
    return {worker: Meeting(where, watch.setups[worker].rank, len(workers)) for worker in workers}
