"""A host's part of the model at its marks: a copy of it, until its loss is known.

What belongs here: how many copies are kept and for how long. What does not: how a loss is computed
(`compute.py`), and what is made of the losses of all hosts (`evaluations.py`).

The copy is made inside the handler that reaches a mark, so exactly the model of that mark is
evaluated. Copies cost memory: where marks come faster than evaluations end, the handler waits.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

from archipel.actor import Vector
from archipel.live.protocol import Mark

COPIES = 3
"""Most copies of the model that a host keeps at a time: one to take home and two that wait for
their evaluation.
"""


@dataclass
class Copy:
    """A copy of this host's part of the model.

    Attributes:
        numbers: numbers of the marks that it belongs to; one handler can reach several.
        vector: the part.
    """

    numbers: range
    vector: Vector


class Marks:
    """The marks of one host. Handlers add them, a second thread evaluates them, a third one asks.

    Args:
        counts: inner steps at which a mark is reached, rising.
        waits_for_release: see `protocol.HostSetup`.

    Attributes:
        reached: all marks so far, by number.
        complete: set when all counts have been reached.
    """

    def __init__(self, counts: Sequence[int], *, waits_for_release: bool) -> None:
        self.counts, self.waits_for_release = counts, waits_for_release
        self.reached: list[Mark] = []
        self.complete = threading.Event()
        self._copies: list[Copy] = []
        self._released = 0
        self._open = True
        self._changed = threading.Condition()

    def due(self, trained: int) -> int:
        """How many counts have been reached for which there is no mark yet."""
        if not self._open:
            return 0
        return sum(count <= trained for count in self.counts[len(self.reached) :])

    def wait_for_room(self) -> None:
        """Wait until one more copy can be kept, or the marks are closed."""
        with self._changed:
            self._changed.wait_for(lambda: not self._open or self._has_room())

    def add(self, mark: Mark, vector: Vector, count: int = 1) -> Copy:
        """Keep `vector` as the part of the model at the next `count` marks."""
        with self._changed:
            self._drop_needless()
            first = len(self.reached)
            copy = Copy(range(first, first + count), vector)
            self.reached += [mark] * count
            self._copies.append(copy)
            if self._open and len(self.reached) == len(self.counts):
                self.complete.set()
            return copy

    def evaluated(self, copy: Copy, loss: float | None, failure: str | None = None) -> None:
        """The loss of a copy is known, or there is none; `failure` says why it cannot be
        computed.
        """
        with self._changed:
            for number in copy.numbers:
                mark = self.reached[number]
                self.reached[number] = replace(mark, evaluated=True, loss=loss, failure=failure)
            self._changed.notify_all()

    def release(self, count: int) -> None:
        """The copies of the first `count` marks are not needed any more."""
        with self._changed:
            self._released = max(self._released, count)
            self._changed.notify_all()

    def close(self) -> None:
        """No mark is reached on its own from now on; only `add` makes more."""
        with self._changed:
            self._open = False
            self._changed.notify_all()

    @property
    def evaluating(self) -> bool:
        """A loss is still to be computed."""
        return any(not mark.evaluated for mark in self.reached)

    def vector(self, number: int) -> Vector:
        """The part of the model at a mark. The newest one is always there.

        Raises:
            LookupError: it is not kept any more.
        """
        with self._changed:
            for copy in self._copies:
                if number in copy.numbers:
                    return copy.vector
        raise LookupError(f"the model at mark {number} is not kept any more")

    def _has_room(self) -> bool:
        self._drop_needless()
        return len(self._copies) < COPIES

    def _drop_needless(self) -> None:
        self._copies = [copy for copy in self._copies if not self._is_needless(copy)]

    def _is_needless(self, copy: Copy) -> bool:
        last = copy.numbers[-1]
        seen = not self.waits_for_release or last < self._released
        return self.reached[last].evaluated and seen
