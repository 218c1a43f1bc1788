"""One message on its way, on the virtual clock.

What belongs here: what happens to a message from the moment it is sent until its arrival is on the
heap. What does not: what messages there are (`verbs.py`, `stages.py`), how links order and share
them (`links.py`), and what comes of an arrival (`clock.py`).
"""

from __future__ import annotations

from archipel.sim.engine import Engine
from archipel.sim.events import Deliver


def post(engine: Engine, deliver: Deliver) -> None:
    """A node sends a message, which arrives unless its receiver is gone or cannot be reached."""
    state, sender, to = engine.state, deliver.sender, deliver.to
    outages = state.outages
    if sender != to:  # a node's message to itself crosses no link: it cannot be lost or watched
        if (outages.down or outages.severed) and not outages.reachable(sender, to):
            # The sender does not know, so its bytes leave all the same, and count.
            waste(engine, deliver, copies=1)
            return
        for observer in state.observers:
            observer.sends(sender, to, deliver.message)
    if state.links.shares(deliver):
        # Its end depends on what else uses the link. `clock.py` calls `depart` when it is known.
        engine.push(*state.links.join(deliver, state.now, state.number))
    else:
        usual_s = engine.setting.network.message_s(sender, to, deliver.size_bytes)
        depart(engine, deliver, state.now, state.now + usual_s)


def depart(engine: Engine, deliver: Deliver, start_s: float, end_s: float) -> None:
    """Count a message's bytes and plan its arrival. It left at `start_s`, and arrives at `end_s` if
    nothing disturbs it.
    """
    state, faults = engine.state, engine.setting.faults
    sender, to, size_bytes = deliver.sender, deliver.to, deliver.size_bytes
    usual_s = end_s - start_s
    # The whole schedule of faults is known, so what they do to this message is computed here, once:
    # nothing is sent again later, and no event has to be taken back.
    if faults.disturb_messages and sender != to:
        end_s, copies = faults.arrival(state.outages.rng, sender, to, start_s, end_s, usual_s)
        if copies > 1:
            waste(engine, deliver, copies - 1)
    # After the disturbance, because it must not change the order of one sender's messages either.
    end_s = state.links.arrival_s(deliver, end_s, state.now, state.number)
    slow = sender.region != to.region
    state.recorder.sends(sender, start_s, end_s, size_bytes, slow=slow)
    if sender != to:
        for observer in state.observers:
            observer.departs(sender, to, deliver.message, size_bytes, usual_s)
    engine.push(end_s, deliver)  # gets the number that `arrival_s` was told: nothing lies between


def waste(engine: Engine, deliver: Deliver, copies: int) -> None:
    """Count the bytes of messages that reach nobody, or are sent once more."""
    size_bytes = copies * deliver.size_bytes
    slow = deliver.sender.region != deliver.to.region
    engine.state.recorder.counts(copies, size_bytes, size_bytes if slow else 0.0)
    for observer in engine.state.observers:
        observer.wastes(size_bytes)
