"""What happened in a run: the one door through which figures leave an engine.

What belongs here: the recorder that engines write to, and the files that it leaves
(`metrics.jsonl`, `trace.json`). What does not: anything that decides what happens, and tables or
plots (`report/`).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from archipel.actor import Group, NodeId

MAX_SPANS = 10_000
"""A trace keeps this many spans and says when it is cut; counts and sums go on."""


@dataclass(frozen=True)
class Span:
    """Something that a node did for a while: `compute`, `send` or `all_reduce`."""

    node: NodeId
    what: str
    start_s: float
    end_s: float


@dataclass
class Evaluation:
    """The model that a user would take home, at one moment of the run.

    Attributes:
        time_s: when, on the engine's clock.
        inner_steps: that all workers together have trained, as far as those know who hold the
            model.
        tokens: the same number in tokens; None where nothing is trained.
        absorbed_steps: inner steps that are in the model; HALoS trains some that never reach it.
        outer_steps: see `actor.Actor`.
        sent_bytes, slow_link_bytes: so far, on all links and on those between regions.
        loss: validation loss of the model.
        replica_loss: mean of the replicas' own validation losses, where the model is a mean of
            replicas.
        replica_std: spread of these replicas: sqrt(mean over weights and replicas of (φ_i − mean
            φ)²).
    """

    time_s: float
    inner_steps: int
    tokens: int | None
    absorbed_steps: int
    outer_steps: int
    sent_bytes: int
    slow_link_bytes: int
    loss: float | None = None
    replica_loss: float | None = None
    replica_std: float | None = None

    @property
    def has_loss(self) -> bool:
        """Its losses are there, as far as they are known before the end."""
        return self.loss is not None or self.replica_loss is not None


@dataclass(frozen=True)
class Training:
    """Inner steps that a worker finished: when, how many, their mean loss, and the common progress
    that it was told.
    """

    time_s: float
    node: NodeId
    steps: int
    loss: float
    progress: int


@dataclass(frozen=True)
class Outage:
    """Something is not there any more, or there again, and all have been told.

    Attributes:
        what: `lost` or `joined`, of a node; `cut` or `mended`, of a link.
        who: the node, or the regions at the link's ends.
    """

    time_s: float
    what: str
    who: str


def evaluation_line(evaluation: Evaluation) -> dict[str, Any]:
    """The line of `metrics.jsonl` for an evaluation."""
    return {"kind": "eval", **asdict(evaluation)}


LearningRate = Callable[[int], float]
"""That of the inner step at which all workers together have taken so many."""


def training_line(training: Training, learning_rate: LearningRate | None) -> dict[str, Any]:
    """The line of `metrics.jsonl` for a worker's inner steps; `learning_rate`: of the first of
    them.
    """
    return {
        "kind": "train",
        "time_s": training.time_s,
        "node": str(training.node),
        "steps": training.steps,
        "loss": training.loss,
        "progress": training.progress,
        **({} if learning_rate is None else {"learning_rate": learning_rate(training.progress)}),
    }


def link_name(link: tuple[str, str]) -> str:
    """A link between two regions, in any order, for an `Outage`."""
    return " – ".join(sorted(link))


@dataclass
class Recorder:
    """Counts, sums and records of one run.

    Attributes:
        on_progress: called with (inner steps absorbed, seconds on the engine's clock) when the
            model to take home has changed.
        refused: how many updates of each sender were refused, see `screening.py`.
        restarted: how often each worker was restarted after a loss that was not finite.
        outages: nodes and links that were lost, and those that came back.
    """

    on_progress: Callable[[int, float], None] = lambda steps, now: None
    messages: int = 0
    sent_bytes: float = 0.0
    slow_link_bytes: float = 0.0
    compute_s: dict[NodeId, float] = field(default_factory=dict)
    last_job: dict[NodeId, tuple[float, float, float]] = field(
        default_factory=dict
    )  # its start, end, and computing seconds
    spans: list[Span] = field(default_factory=list)
    spans_cut: bool = False
    evaluations: list[Evaluation] = field(default_factory=list)
    trainings: list[Training] = field(default_factory=list)
    refused: dict[NodeId, int] = field(default_factory=dict)
    restarted: dict[NodeId, int] = field(default_factory=dict)
    outages: list[Outage] = field(default_factory=list)

    def happens(self, what: str, who: str, now: float) -> None:
        """A node or a link is lost, or there again; see `Outage`."""
        self.outages.append(Outage(now, what, who))

    def computes(
        self, node: NodeId, start_s: float, end_s: float, busy_s: float | None = None
    ) -> None:
        """`node` trains from `start_s` to `end_s`, of which it computes for `busy_s`: a stage of a
        pipeline also waits.
        """
        busy_s = end_s - start_s if busy_s is None else busy_s
        self.compute_s[node] = self.compute_s.get(node, 0.0) + busy_s
        self.last_job[node] = start_s, end_s, busy_s
        self._span(node, "compute", start_s, end_s)

    def loses_job(self, node: NodeId, now: float) -> None:
        """The inner steps that `node` takes end at `now`, unfinished: it has not computed
        longer.
        """
        start_s, end_s, busy_s = self.last_job[node]
        if end_s <= now:
            return
        done_s = busy_s * (now - start_s) / (end_s - start_s)
        self.compute_s[node] += done_s - busy_s
        self.last_job[node] = start_s, now, done_s
        span = Span(node, "compute", start_s, end_s)
        if span in self.spans:  # unless the trace was cut before it
            self.spans[self.spans.index(span)] = Span(node, "compute", start_s, now)

    def sends(
        self, node: NodeId, start_s: float, end_s: float, size_bytes: float, *, slow: bool
    ) -> None:
        """A message of `node` is under way from `start_s` to `end_s`; `slow`: it leaves its
        region.
        """
        self.counts(1, size_bytes, size_bytes if slow else 0.0)
        self._span(node, "send", start_s, end_s)

    def reduces(self, group: Group, start_s: float, end_s: float) -> None:
        """A collective of `group` is under way."""
        for node in group:
            self._span(node, "all_reduce", start_s, end_s)

    def counts(self, messages: int, sent_bytes: float, slow_link_bytes: float) -> None:
        self.messages += messages
        self.sent_bytes += sent_bytes
        self.slow_link_bytes += slow_link_bytes

    def refuses(self, sender: NodeId, why: str, now: float) -> None:
        """An update of `sender` is refused; its first one with a warning."""
        if sender not in self.refused:
            warnings.warn(
                f"an update of {sender} is refused after {now:.1f} s: {why}; more of them are only "
                "counted",
                stacklevel=2,
            )
        self.refused[sender] = self.refused.get(sender, 0) + 1

    def restarts(self, worker: NodeId, why: str, now: float) -> None:
        """A worker begins again from the newest model; the first time with a warning."""
        if worker not in self.restarted:
            warnings.warn(
                f"{why}, after {now:.1f} s; it is restarted from the newest model", stacklevel=2
            )
        self.restarted[worker] = self.restarted.get(worker, 0) + 1

    def idle_fraction(self, workers: Sequence[NodeId], end_s: float) -> float | None:
        """The part of the workers' time until `end_s` in which they did not compute; None if no
        time has passed.
        """
        if not end_s:
            return None
        unfinished_s = sum(
            busy_s * (end - end_s) / (end - start)
            for start, end, busy_s in self.last_job.values()
            if end > end_s
        )
        return 1 - (sum(self.compute_s.values()) - unfinished_s) / (len(workers) * end_s)

    def _span(self, node: NodeId, what: str, start_s: float, end_s: float) -> None:
        self.spans_cut = self.spans_cut or len(self.spans) == MAX_SPANS
        if not self.spans_cut:
            self.spans.append(Span(node, what, start_s, end_s))

    # Files

    def write_metrics(self, path: Path, learning_rate: LearningRate | None = None) -> None:
        """One JSON object a line, in the order of time: evaluations of the model, and the training
        losses of the workers, with the learning rate there if it is known.
        """
        lines = [(e.time_s, evaluation_line(e)) for e in self.evaluations]
        lines += [(t.time_s, training_line(t, learning_rate)) for t in self.trainings]
        lines.sort(key=lambda line: line[0])
        path.write_text("".join(json.dumps(record) + "\n" for _, record in lines))

    def write_trace(self, path: Path, nodes: Sequence[NodeId], end_s: float) -> None:
        """Chrome's trace format, as read by ui.perfetto.dev: a process a region, a thread a node;
        times in microseconds.
        """
        regions = list(dict.fromkeys(node.region for node in nodes))
        row = {node: {"pid": regions.index(node.region), "tid": i} for i, node in enumerate(nodes)}
        events: list[dict[str, Any]] = [
            {"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": region}}
            for pid, region in enumerate(regions)
        ]
        events += [
            {"name": "thread_name", "ph": "M", **row[node], "args": {"name": str(node)}}
            for node in nodes
        ]
        events += [
            {
                "name": span.what,
                "ph": "X",
                **row[span.node],
                "ts": span.start_s * 1e6,
                "dur": (min(span.end_s, end_s) - span.start_s) * 1e6,
            }
            for span in self.spans
            if span.start_s < end_s
        ]
        path.write_text(
            json.dumps(
                {
                    "traceEvents": events,
                    "otherData": {"cut_after_spans": MAX_SPANS if self.spans_cut else None},
                }
            )
        )


def merged(recorders: Sequence[Recorder], end_s: float) -> Recorder:
    """What several recorders have put down until `end_s`, in the order of time; counts and sums of
    all of it.
    """
    whole = Recorder(spans_cut=any(recorder.spans_cut for recorder in recorders))
    for recorder in recorders:
        whole.counts(recorder.messages, recorder.sent_bytes, recorder.slow_link_bytes)
        for node, compute_s in recorder.compute_s.items():
            whole.compute_s[node] = whole.compute_s.get(node, 0.0) + compute_s
        for node, count in recorder.refused.items():
            whole.refused[node] = whole.refused.get(node, 0) + count
        for node, count in recorder.restarted.items():
            whole.restarted[node] = whole.restarted.get(node, 0) + count
        for node, (start_s, stop_s, busy_s) in recorder.last_job.items():
            if start_s < end_s:
                whole.last_job[node] = start_s, stop_s, busy_s
            else:
                whole.compute_s[node] -= busy_s
        whole.spans += [span for span in recorder.spans if span.start_s < end_s]
        whole.trainings += [training for training in recorder.trainings if training.time_s <= end_s]
    whole.spans.sort(key=lambda span: span.start_s)
    whole.trainings.sort(key=lambda training: training.time_s)
    return whole
