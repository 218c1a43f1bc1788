"""A link with latency, jitter and loss between two network namespaces: two TUN devices, and this
process, which carries packets from one to the other. For kernels without netem.

What belongs here: how long a packet takes, and whether it arrives. What does not: the bandwidth,
which `tc … tbf` limits before a packet comes here, and the namespaces (`network.py`, which starts
this as a process of its own).

It ends when its standard input does: with whoever started it, also if that was killed.
"""

from __future__ import annotations

import fcntl
import os
import random
import select
import struct
import sys
import time
from collections import deque
from contextlib import suppress

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
LARGEST_PACKET = 65536
SAME_JITTER_S = 0.02
"""Packets of so long a time share one drawing of the jitter: latency moves slowly, and packets that
follow each other closely keep their order, as they do on most paths."""


def open_tun(name: str) -> int:
    """Make a TUN device; it is gone when its descriptor is closed."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    return descriptor


class Direction:
    """The packets on their way from one device to the other.

    Args:
        source, target: descriptors of the two devices.
        latency_s: the median time that a packet takes.
        jitter: the sigma of that time's logarithm.
        loss: the part of all packets that do not arrive.
        seed: of what is drawn.
    """

    def __init__(
        self, source: int, target: int, latency_s: float, jitter: float, loss: float, seed: int
    ) -> None:
        self.source, self.target = source, target
        self.latency_s, self.jitter, self.loss = latency_s, jitter, loss
        self.rng = random.Random(seed)
        self.waiting: deque[tuple[float, bytes]] = deque()
        self.takes_s, self.drawn_s, self.last_due_s = latency_s, float("-inf"), 0.0

    def take(self) -> None:
        """Take in all packets that are there."""
        now_s = time.monotonic()
        if self.jitter and now_s - self.drawn_s > SAME_JITTER_S:
            self.takes_s = self.latency_s * self.rng.lognormvariate(0.0, self.jitter)
            self.drawn_s = now_s
        # No packet overtakes another one.
        due_s = self.last_due_s = max(self.last_due_s, now_s + self.takes_s)
        with suppress(OSError):  # there are no more, or the device is down
            while packet := os.read(self.source, LARGEST_PACKET):
                if self.rng.random() >= self.loss:
                    self.waiting.append((due_s, packet))

    def give(self, now_s: float) -> None:
        """Hand over all packets whose time has come."""
        while self.waiting and self.waiting[0][0] <= now_s:
            packet = self.waiting.popleft()[1]
            with suppress(OSError):  # the device is full or down: that packet is lost
                os.write(self.target, packet)


def main() -> None:
    """Arguments: the devices' names, latency in seconds, jitter, loss, seed. Says `ready` when both
    devices are there.
    """
    first, second = open_tun(sys.argv[1]), open_tun(sys.argv[2])
    latency_s, jitter, loss, seed = map(float, sys.argv[3:7])
    there = Direction(first, second, latency_s, jitter, loss, 2 * int(seed))
    back = Direction(second, first, latency_s, jitter, loss, 2 * int(seed) + 1)
    by_source = {first: there, second: back}
    print("ready", flush=True)
    while True:
        due_s = [one.waiting[0][0] for one in (there, back) if one.waiting]
        wait_s = max(0.0, min(due_s) - time.monotonic()) if due_s else None
        readable, _, _ = select.select([first, second, sys.stdin], [], [], wait_s)
        if sys.stdin in readable:
            return
        for source in readable:
            by_source[source].take()
        now_s = time.monotonic()
        there.give(now_s)
        back.give(now_s)


if __name__ == "__main__":
    main()
