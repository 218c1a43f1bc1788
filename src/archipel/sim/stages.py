"""Inner steps of a model in stages, on the virtual clock.

What belongs here: the events of a team's inner steps, from the node that asks last to the moment
when each node has taken them. What does not: who is in a team and what its steps cost (`teams.py`),
and in what order a node works (`passes.py`).

Where no message disturbs another, all ends are computed at the start. Where messages share links,
their arrivals are not known beforehand: then each end of a node's work, and each message, is an
event.
"""

from __future__ import annotations

from archipel.actor import NodeId
from archipel.sim.engine import Engine
from archipel.sim.events import Deliver, Finish, PassEnd
from archipel.sim.messages import post
from archipel.sim.passes import Activations
from archipel.sim.teams import Lap, Request, Teams


def train(engine: Engine, me: NodeId, request: Request) -> None:
    """Wait for the others of this node's team; the last one to ask starts their inner steps."""
    state, teams = engine.state, teams_of(engine)
    state.nodes[me].begin_job()
    lap = teams.join(me, request)
    if lap is None:
        return
    _compute(engine, lap)
    if teams.share_links(lap):
        teams.passes.update(dict.fromkeys(lap.requests, teams.passes_of(lap)))
        for node in lap.requests:
            _go_on(engine, node)
        return
    end_s, tally = teams.end_s(lap, state.now)
    engine.push(float(end_s.max()), tally)
    for node, node_end_s in zip(lap.requests, end_s.flatten().tolist(), strict=True):
        busy_s = teams.busy_s(node, lap.steps)
        state.recorder.computes(node, state.now, node_end_s, busy_s)
        engine.push(node_end_s, state.jobs[node])


def arrives(engine: Engine, node: NodeId, activations: Activations) -> None:
    """A node has got what it needs for one pass."""
    teams_of(engine).passes[node].arrives(node, activations.number)
    _go_on(engine, node)


def ends(engine: Engine, node: NodeId) -> None:
    """A node has done its work in one pass, and hands on what came of it."""
    output = teams_of(engine).passes[node].ends(node)
    if output is not None:
        to, activations, size_bytes = output
        post(engine, Deliver(to, activations, node, size_bytes))
    _go_on(engine, node)


def teams_of(engine: Engine) -> Teams:
    """The teams of a model in stages."""
    teams = engine.state.teams
    assert teams is not None
    return teams


def _compute(engine: Engine, lap: Lap) -> None:
    """Have the gradients computed in the background. They are wanted when nodes have worked as long
    as they must: earlier than they ever are.
    """
    state, teams = engine.state, teams_of(engine)
    answers = engine.setting.trainer.train_stages(
        lap.team,
        [asked.theta for asked in lap.requests.values()],
        lap.steps,
        [asked.progress for asked in lap.requests.values()],
        state.now + min(teams.busy_s(node, lap.steps) for node in lap.requests),
    )
    for (node, asked), answer in zip(lap.requests.items(), answers, strict=True):
        state.jobs[node] = Finish(node, answer, lap.steps, asked.progress)


def _go_on(engine: Engine, node: NodeId) -> None:
    """Have a node begin its next pass, if it can; its inner steps end with the last one."""
    state, passes = engine.state, teams_of(engine).passes[node]
    if passes.is_done(node):
        del teams_of(engine).passes[node]
        engine.push(state.now, state.jobs[node])
        return
    seconds = passes.begins(node)
    if seconds is not None:
        if seconds:
            state.recorder.computes(node, state.now, state.now + seconds)
        engine.push(state.now + seconds, PassEnd(node))
