"""One actor's rules under any clock.

What belongs here: what every engine does for a single actor before and after it reacts: it refuses
bad updates, lets a worker have one job at a time, and records the results of inner steps. What does
not: who else there is (`census.py`), when anything happens (`sim/`, `live/`), and what the actor
does.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from archipel.actor import (
    Actor,
    Context,
    Gradient,
    Message,
    NodeId,
    Reduced,
    Refused,
    Trained,
    Update,
    Vector,
)
from archipel.errors import TrainingError
from archipel.run import wire
from archipel.run.metrics import Recorder, Training
from archipel.run.screening import Screen
from archipel.run.wire import Coder


@dataclass
class Node:
    """An actor, and what an engine keeps beside it.

    Attributes:
        actor: reacts to messages.
        parameters: leading entries of this node's vectors that are parameters; 0 where nothing is
            trained.
        numel: entries of this node's vectors; 0 where nothing is trained.
        screen: judges the updates that this node receives, and what it gives to collectives; None:
            everything is accepted.
        busy: inner steps of this worker are under way.
        told: the kind of the last message that the actor reacted to.
        coder: how this node's vectors travel.
    """

    actor: Actor
    parameters: int = 0
    numel: int = 0
    screen: Screen | None = None
    busy: bool = False
    told: str = ""
    coder: Coder = field(default_factory=Coder)

    def handle(self, message: Message, sender: NodeId, ctx: Context, recorder: Recorder) -> None:
        """Let the actor react to a message, or to its refusal.

        Raises:
            TrainingError: it has changed a vector of the message in place.
        """
        if (
            self.screen is not None
            and isinstance(message, Update)
            and self.refuses(wire.vectors(message), sender, ctx.now, recorder)
        ):
            message = Refused(message)
        self.told = type(message).__name__
        own = sender == self.actor.me and not isinstance(message, Reduced)
        if own or not self.numel:  # nobody else holds it, or it is empty: nothing to look after
            self._react(message, sender, ctx)
            return
        vectors = wire.vectors(message)
        before = _changes(vectors)
        self._react(message, sender, ctx)
        if _changes(vectors) != before:
            raise TrainingError(
                f"{self.actor.me} changed a vector in place that it was sent in {self.told} by "
                f"{sender}: others may hold the same one; clone it before"
            )

    def _react(self, message: Message, sender: NodeId, ctx: Context) -> None:
        self.actor.upon(message, sender, ctx)
        self.coder.last = None

    def refuses(
        self, vectors: list[Vector], sender: NodeId, now: float, recorder: Recorder
    ) -> bool:
        """Whether to do without an update of `sender`, which is then counted.

        In a collective nobody sees what another member gives, so each one judges its own vector.
        """
        why = self.screen.refuses(vectors, self.parameters) if self.screen else None
        if why is not None:
            recorder.refuses(sender, why, now)
        return why is not None

    def check_steps(self, steps: int) -> None:
        """Raise a TrainingError if the actor asks for less than one inner step: a method's mistake,
        which would else look like a worker that idles.
        """
        if steps < 1:
            raise TrainingError(
                f"{self.actor.me} asked to train for {steps} inner steps: at least 1 is needed"
            )

    def begin_job(self) -> None:
        """The worker begins to take inner steps.

        Raises:
            TrainingError: it takes some already.
        """
        if self.busy:
            raise TrainingError(
                f"{self.actor.me} asked to train while it is training: a method's worker has one "
                "job at "
                "a time"
            )
        self.busy = True

    def end_job(
        self, answer: Message, now: float, progress: int, recorder: Recorder, *, losses_count: bool
    ) -> float | None:
        """The worker has taken its inner steps; their mean loss, if they have one.

        Args:
            answer: what the actor will be told.
            progress: what it gave as the common progress.
            losses_count: something is trained, so that the loss of a single gradient means
                something.
        """
        self.busy = False
        match answer:
            case Trained(losses=losses, steps=steps) if losses:
                loss = sum(losses) / len(losses)
            case Gradient(loss=loss) if losses_count:
                steps = 1
            case _:
                return None
        recorder.trainings.append(Training(now, self.actor.me, steps, loss, progress))
        return loss


def _changes(vectors: list[Vector]) -> list[int]:
    """How often each vector has been changed in place, as torch counts it; also through a view."""
    return [0 if vector.is_inference() else vector._version for vector in vectors]
