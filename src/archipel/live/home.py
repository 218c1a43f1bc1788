"""Taking the model home: its parts travel to the process of the command, and are put together
there.

What belongs here: putting whole models together from the parts that hosts hold, and the loss of
their mean. What does not: the losses at marks, which hosts compute themselves (`compute.py`), and
the files that a run leaves.

This happens once, at the end, with one exception: a stage of a pipeline has no loss of its own, so
stages travel at each mark.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from archipel import outer
from archipel.actor import NodeId, Vector
from archipel.live.evaluations import Losses
from archipel.live.fleet import Died
from archipel.run.census import spread
from archipel.train.pipeline import Pipeline, join
from archipel.train.replica import Replica


@dataclass
class Home:
    """The models that are put together in the process of the command.

    Attributes:
        fetch: gets a host's part of the model at one of its marks.
        replica: computes losses; None where nothing is trained.
        pipeline: whose stages the parts are; None: each part is a whole model.
        order: all nodes, in the order in which a mean is summed up.
        marks: number of the mark of each holder whose part is here.
        parts: the parts themselves.
        received_bytes: of all parts that have come so far.
    """

    fetch: Callable[[NodeId, int], Vector]
    replica: Replica | None
    pipeline: Pipeline | None
    order: Sequence[NodeId]
    marks: dict[NodeId, int] = field(default_factory=dict)
    parts: dict[NodeId, Vector] = field(default_factory=dict)
    received_bytes: int = 0

    def bring(self, marks: Mapping[NodeId, int]) -> dict[NodeId, Died]:
        """Have the parts of the model at `marks` here, and no others. What is here already does not
        travel again.

        Returns:
            The holders whose parts could not be had, since they have died.
        """
        missing = {}
        for node in [node for node in self.marks if self.marks[node] != marks.get(node)]:
            del self.marks[node], self.parts[node]
        for node in marks.keys() - self.marks.keys():
            try:
                self.parts[node] = self.fetch(node, marks[node])
            except Died as error:
                missing[node] = error
            else:
                self.marks[node] = marks[node]
                self.received_bytes += self.parts[node].nbytes
        return missing

    def models(self) -> list[Vector]:
        """The whole models whose mean is taken home, in rank order: the parts, or those of a
        replica's stages joined.
        """
        if self.pipeline is None:
            return [self.parts[node] for node in self.order if node in self.parts]
        stages = [
            [self.parts[node] for node in stage if node in self.parts]
            for stage in self.pipeline.nodes
        ]
        return [join(group, self.pipeline.parameters) for group in zip(*stages, strict=True)]

    def evaluate(self, marks: Mapping[NodeId, int]) -> Losses:
        """What the model at `marks` is worth; its parts are here afterwards. Losses of replicas
        that their hosts have computed are not computed again.

        Raises:
            Died: a holder has died.
        """
        if self.replica is None:
            return Losses(None)
        for error in self.bring(marks).values():
            raise error
        models = self.models()
        mean = outer.mean(models)
        alone = models if self.pipeline and len(models) > 1 else ()
        own = [self.replica.evaluate(model)[0] for model in alone]
        [loss] = self.replica.evaluate(mean)
        return Losses(loss, own, spread(models, mean, self.replica.layout.parameters))
