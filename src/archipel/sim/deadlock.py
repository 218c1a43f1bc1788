"""Saying who waits for what, when nothing can happen any more on the virtual clock.

What belongs here: the words for it. What does not: how a deadlock is noticed (`clock.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from archipel.sim.engine import RunState


def who_waits(state: RunState) -> str:
    """The first few nodes and what each of them waits for; those in teams and collectives first."""
    return _first(_waits(state), 8)


def _waits(state: RunState) -> Iterator[str]:
    named = set()
    for requests in state.teams.waiting.values() if state.teams else ():
        for node in requests:
            named.add(node)
            yield f"{node} waits for the other stages of its pipeline to train"
    waiting = state.collectives.waiting
    for node, call in waiting.items():
        named.add(node)
        missing = [
            str(other)
            for other in call.group
            if other not in waiting or waiting[other].round != call.round
        ]
        yield f"{node} waits in an all-reduce of {len(call.group)} for {_first(missing, 4)}"
    for me, one in state.nodes.items():
        if me in state.outages.down:
            yield f"{me} is lost"
        elif me not in named:
            # It may be waiting because its method does not answer this message.
            since = f" since it was told `{one.told}`" if one.told in ("Lost", "Joined") else ""
            yield f"{me} waits for {one.actor.waits_for()}{since}"


def _first(texts: Iterable[str], count: int) -> str:
    """The first `count` of `texts`, and how many more there are."""
    everything = list(texts)
    more = f" and {len(everything) - count} more" if len(everything) > count else ""
    return ", ".join(everything[:count]) + more
