"""What happens on the virtual clock when something goes wrong.

What belongs here: what happens, in which order, when a node or a link is lost and when it comes
back. What does not: what goes wrong and when (`schedule.py`), and how actors react to the news
(`methods/`).
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable

from archipel.actor import Joined, NodeId
from archipel.errors import Diverged, TrainingError
from archipel.run.metrics import link_name
from archipel.sim.engine import Engine
from archipel.sim.events import Fail, Mend, Notice, Return, Save, Sever, Trouble
from archipel.sim.outages import News, Saved
from archipel.sim.verbs import reduce


def go_wrong(engine: Engine, event: Trouble) -> None:
    """One event of a schedule of faults happens."""
    state, outages = engine.state, engine.state.outages
    match event:
        case Save(node) if node not in outages.down:
            outages.saves[node] = saved(engine, node)
        case Fail(node, leaves):
            if leaves:
                outages.left[node] = None
            if node not in outages.down:
                _stop(engine, node)
                deadline_s = engine.setting.faults.deadline_s
                engine.push(state.now + deadline_s, Notice(node, state.now))
            if leaves and node not in outages.lost:
                _lose(engine, node)
        case Notice(node, since_s) if (
            outages.down.get(node) == since_s and node not in outages.lost
        ):
            _lose(engine, node)
        case Return(node) if node in outages.down and node not in outages.left:
            _return(engine, node)
        case Sever(link):
            for end in state.links.lose_link(link, state.now, state.number):
                engine.push(*end)
            for observer in state.observers:
                observer.loses(lambda sender, to: {sender.region, to.region} == {*link})
            state.recorder.happens("cut", link_name(link), state.now)
            _tell(engine, outages.cut(link))
        case Mend(link):
            state.recorder.happens("mended", link_name(link), state.now)
            _tell(engine, outages.mend(link))


def saved(engine: Engine, node: NodeId) -> Saved:
    """A node's state as of now. Inner steps under way are no part of it: they will be lost with
    it.
    """
    state, setting, worker = engine.state, engine.setting, None
    if node in setting.step_time_s:
        busy = state.nodes[node].busy
        worker = state.outages.before[node] if busy else setting.trainer.state_of(node)
    kept = state.nodes[node]
    return Saved(copy.deepcopy(kept.actor), worker, dict(kept.coder.left))


def begin_anew(engine: Engine, worker: NodeId, error: str) -> None:
    """A worker whose loss is not finite is lost and back at once, as it is. Its inner optimizer
    begins anew: what that keeps may not be finite.

    Raises:
        Diverged: the run ends by that; see `Census.bad_loss`.
    """
    state = engine.state
    state.census.bad_loss(worker, f"{error}, after {state.now:.1f} s on the virtual clock")
    state.recorder.restarts(worker, error, state.now)
    engine.setting.trainer.reset_optimizer(worker)
    _stop(engine, worker)
    _lose(engine, worker)
    _rejoin(engine, worker)


def _stop(engine: Engine, node: NodeId) -> None:
    """A node is gone, and all that it had under way. Nobody knows yet."""
    state = engine.state
    if job := state.jobs.pop(node, None):
        with contextlib.suppress(Diverged, TrainingError):
            job.answer.result()  # the memory that it is computed in is needed again
        state.recorder.loses_job(node, state.now)
    state.nodes[node].busy = False
    for end in state.links.lose_node(node, state.now, state.number):
        engine.push(*end)
    for observer in state.observers:
        observer.loses(lambda sender, to: node in (sender, to))
    state.links.void_events.update(state.collectives.leave(node))
    state.outages.fail(node, state.now)
    engine.recount()


def _lose(engine: Engine, node: NodeId) -> None:
    """The others are told that a node is gone. A collective that waited for it goes on without
    it.
    """
    state = engine.state
    state.collectives.forget(node)
    state.recorder.happens("lost", str(node), state.now)
    _tell(engine, state.outages.lose(node))
    for member in list(state.collectives.waiting):
        complete = state.collectives.complete(member, state.outages.lost)
        if complete is not None:
            reduce(engine, complete)


def _return(engine: Engine, node: NodeId) -> None:
    """A node comes (again), with the state of its last save."""
    state, saves = engine.state, engine.state.outages.saves
    if node not in state.outages.lost:
        _lose(engine, node)
    if node in saves:
        state.nodes[node].actor = copy.deepcopy(saves[node].actor)
        state.nodes[node].coder.left = dict(saves[node].left)
        if node in engine.setting.step_time_s:
            engine.setting.trainer.put(node, saves[node].worker)
    for observer in state.observers:
        observer.returns(state.nodes[node].actor)
    _rejoin(engine, node)


def _rejoin(engine: Engine, node: NodeId) -> None:
    """A node is there again. It is told so first, then its peers are, and it who of them is not
    there.
    """
    outages = engine.state.outages
    outages.rejoin(node)
    engine.state.recorder.happens("joined", str(node), engine.state.now)
    engine.handle(node, Joined(node), node)
    engine.recount()
    _tell(engine, outages.news_of_rejoining(node))


def _tell(engine: Engine, news: Iterable[News]) -> None:
    for to, message in list(news):
        engine.handle(to, message, to)
