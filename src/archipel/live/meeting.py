"""Where the processes that take inner steps together find each other.

What belongs here: process groups of torch.distributed (gloo), for the stages of a pipeline and for
the processes of a sharded worker. What does not: what they compute (`train/`), and all other mail,
which never goes this way.
"""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist


@dataclass(frozen=True)
class Meeting:
    """A process group that a process is to join.

    Attributes:
        where: `file://…` for processes on one machine, which then open no port to others; else
            `tcp://…`, on the machine of rank 0.
        rank: of this process.
        size: how many processes there are.
    """

    where: str
    rank: int
    size: int


def meet(meeting: Meeting, deadline_s: float) -> None:
    """Join the process group of a meeting."""
    if meeting.where.startswith("file:"):
        os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
    dist.init_process_group(
        "gloo",
        init_method=meeting.where,
        rank=meeting.rank,
        world_size=meeting.size,
        timeout=timedelta(seconds=deadline_s),
    )


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
