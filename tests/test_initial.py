"""`live/initial.py`: actors travel without the initial weights."""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field, replace

import pytest
import torch

from archipel.actor import Actor, Context, Message, NodeId, Vector
from archipel.live.host import Host
from archipel.live.initial import OtherWeights, digest, initial_weights, pack, unpack
from archipel.live.prepare import make_setups, prepare
from archipel.recipe import parse_recipe

ME = NodeId("a", "w0")


@dataclass(kw_only=True)
class Holder(Actor):
    """Holds vectors of all kinds."""

    vectors: list[Vector] = field(default_factory=list)

    def upon(self, message: Message, sender: NodeId, ctx: Context) -> None: ...


def there_and_back(*vectors: Vector, weights: list[Vector]) -> tuple[int, list[Vector]]:
    packed = pack(Holder(me=ME, vectors=list(vectors)), weights)
    actor = unpack(packed, lambda: weights)
    assert isinstance(actor, Holder)
    return len(packed), actor.vectors


def vectors_of(actor: Actor) -> list[Vector]:
    return [value for value in vars(actor).values() if isinstance(value, torch.Tensor)]


def bits(vector: Vector) -> list[int]:
    return [int(entry) for entry in vector.view(torch.int32)]


def test_weights_and_zeros_do_not_travel_and_everything_else_does() -> None:
    weights = [torch.randn(5000), torch.randn(3000)]
    other, odd = torch.randn(2000), weights[0].clone()
    odd[7] = float("nan")
    minus = torch.zeros(5000)
    minus[-1] = -0.0
    sent = [weights[1].clone(), torch.zeros(4000), other, odd, minus, weights[0][:3000]]
    size, got = there_and_back(*sent, weights=weights)
    assert [bits(vector) for vector in got] == [bits(vector) for vector in sent]
    travelled = 4 * (len(other) + len(odd) + len(minus) + 5000)  # torch sends a view's whole memory
    assert travelled < size < travelled + 4000
    assert there_and_back(weights[0], torch.zeros(5000), weights=weights)[0] < 1000


def test_what_shares_memory_still_does_and_nothing_else_does() -> None:
    weights = [torch.randn(5000)]
    theta, zeros = weights[0].clone(), torch.zeros(5000)
    _, got = there_and_back(
        theta, theta.clone(), theta.detach(), zeros, zeros, zeros.clone(), weights=weights
    )
    assert len({vector.data_ptr() for vector in (*got, weights[0])}) == 5
    assert got[0].data_ptr() == got[2].data_ptr()
    assert got[3].data_ptr() == got[4].data_ptr()


def test_no_weights_are_made_for_an_actor_without_any() -> None:
    def never() -> list[Vector]:
        raise AssertionError

    assert unpack(pack(Holder(me=ME, vectors=[torch.zeros(5000)]), []), never).me == ME
    assert unpack(pickle.dumps(Holder(me=ME)), never).me == ME


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("method", ["noloco", "diloco"])
def test_each_host_makes_the_weights_of_its_stage(method: str, stages: int) -> None:
    parts = prepare(
        parse_recipe(
            {
                "method": {"name": method},
                "topology": {"regions": {"a": [1.0] * 4}},
                "task": {"name": "synthetic", "width": 64, "layers": 2, "valid_sequences": 8},
                "pipeline": {"stages": stages},
                "run": {"steps": 400},
            }
        ),
        resume=False,
    )
    setups = make_setups(parts, None, 0, resume=False)
    assert [len(vector) for vector in parts.weights] == [
        len(vector) for vector in initial_weights(parts.recipe.task, parts.run.seed, parts.pipeline)
    ]
    for actor in parts.actors:
        told = setups[actor.me]
        host = Host(told, lambda to, envelope: None)
        theirs = vectors_of(actor)
        assert len(told.actor) < 5000 < 4 * len(theirs[0])
        assert [bits(vector) for vector in vectors_of(host.actor)] == [*map(bits, theirs)]
        host.compute.thread.shutdown()


def test_weights_of_another_seed_are_not_taken_for_those_of_the_run() -> None:
    recipe = parse_recipe({"method": {"name": "noloco"}, "run": {"steps": 100}})
    parts = prepare(recipe, resume=False)
    told = next(iter(make_setups(parts, None, 0, resume=False).values()))
    assert told.weights == digest(parts.weights)
    other = replace(told, run=replace(told.run, seed=1))
    with pytest.raises(OtherWeights, match=r"^task.model: seed 1 makes other weights here$"):
        Host(other, lambda to, envelope: None)
    # The command's weights are taken, whatever is made here.
    host = Host(other, lambda to, envelope: None, parts.weights)
    assert torch.equal(vectors_of(host.actor)[0], parts.weights[0])
    host.compute.thread.shutdown()
