"""A host of `test_transport_wan.py`, as a process: told line by line what to send, and asked how
things stand.
"""

from __future__ import annotations

import json
import sys
import time

import numpy as np

from archipel.transport.keys import Keys
from archipel.transport.transport import Address, Transport


def main() -> None:
    """Arguments: address and port. The first line of the input holds the keys."""
    certificate, private_key = json.loads(sys.stdin.readline())
    came_s: list[float] = []
    transport = Transport(
        Keys(certificate.encode(), private_key.encode()),
        sys.argv[1],
        deliver=lambda sender, parts: came_s.append(time.monotonic()),
        ports=[int(sys.argv[2])],
    )
    say("ready")
    for line in sys.stdin:
        what, to, size = json.loads(line)
        if what == "how":
            transfers = [
                (one.done_bytes, one.total_bytes, one.bytes_per_s) for one in transport.transfers()
            ]
            wire_bytes = transport.traffic().wire_bytes
            say({"came_s": came_s, "transfers": transfers, "wire_bytes": wire_bytes})
        else:
            vector = np.ones(size, np.uint8)
            transport.send(Address(to, transport.address.port), [vector])


def say(what: object) -> None:
    print(json.dumps(what), flush=True)


if __name__ == "__main__":
    main()
