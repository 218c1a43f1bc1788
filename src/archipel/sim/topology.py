"""Where the workers are, how fast they are, and the links between them.

What belongs here: the description of a network (regions, nodes, links), named presets, and profiles
of a training job's size. What does not: how long anything takes on it, see `network.py`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from archipel.actor import NodeId, WorkerSpec
from archipel.errors import UserError, explain, nearest
from archipel.yamlfile import read_mapping

Speed = Annotated[float, Field(gt=0)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class Link(Strict):
    """A link and what it does to one message: `latency + bytes · (1 + overhead) / bandwidth`, the
    same in both directions.

    `jitter` is the standard deviation of the natural logarithm of the latency, drawn anew for each
    message, so that `latency_ms` is its median; 0 makes every message alike.
    """

    bandwidth_gbit_s: float = Field(gt=0, description="bandwidth in each direction, in Gbit/s")
    latency_ms: float = Field(0.0, ge=0, description="median one-way latency in milliseconds")
    jitter: float = Field(
        0.0,
        ge=0,
        le=3,
        description="standard deviation of the latency's logarithm; 0: every message alike",
    )
    overhead: float = Field(
        0.0,
        ge=0,
        le=1,
        description="bytes of packet headers and encryption that cross with each byte of a message",
    )

    @cached_property
    def bandwidth_bytes_per_s(self) -> float:
        """Bytes of messages that the link passes in a second."""
        return self.bandwidth_gbit_s * 1e9 / 8 / (1 + self.overhead)

    @cached_property
    def latency_s(self) -> float:
        return self.latency_ms / 1e3


class RegionLink(Link):
    """A link between two regions."""

    between: tuple[str, str] = Field(  # YAML has lists, not tuples
        strict=False, description="the two regions that it joins"
    )


class Topology(Strict):
    """Regions of workers, and the links inside and between them."""

    name: str = Field("custom", description="what reports call it")
    regions: dict[str, list[Speed]] = Field(
        min_length=1,
        description="the relative speeds of each region's workers; the fastest worker of all takes "
        "the profile's step time",
    )
    local: Link = Field(
        Link(bandwidth_gbit_s=100),
        description="the link between any two nodes of one region; a region's network is switched: "
        "its transfers never share it",
    )
    links: list[RegionLink] = Field([], description="the links between regions")
    default: Link | None = Field(
        None, description="the link between regions that `links` does not name; null: there is none"
    )
    sharing: Literal["none", "fair"] = Field(
        "none",
        description="none: every transfer has the link to itself (the published simulators' rule); "
        "fair: the transfers in one direction of a link between regions share it equally",
    )
    collective: Literal["ring", "tree", "chain"] = Field(
        "ring", description="how an all-reduce goes: ring, tree, or chain as in live runs"
    )

    @field_validator("regions")
    @classmethod
    def _regions_hold_workers(cls, regions: dict[str, list[float]]) -> dict[str, list[float]]:
        for name in regions:
            if not re.fullmatch(r"[\w.-]+", name):
                raise ValueError(f"region name {name!r}: use letters, digits, '.', '_' and '-'")
        if not any(regions.values()):
            raise ValueError(
                "there are no workers: give at least one region a list of speeds such as [1.0, 0.5]"
            )
        return regions

    @model_validator(mode="after")
    def _links_name_regions(self) -> Topology:
        seen: set[frozenset[str]] = set()
        for link in self.links:
            for name in link.between:
                if name not in self.regions:
                    raise ValueError(
                        f"link between {link.between}: unknown region "
                        f"{name!r}{nearest(name, self.regions)}"
                    )
            pair = frozenset(link.between)
            if len(pair) == 1:
                raise ValueError(
                    f"link between {link.between}: a region's own link is set under `local`"
                )
            if pair in seen:
                raise ValueError(f"link between {link.between} is given twice")
            seen.add(pair)
        return self

    @cached_property
    def workers(self) -> tuple[WorkerSpec, ...]:
        """All workers in rank order: region by region, `w0`, `w1`, … in each."""
        return tuple(
            WorkerSpec(NodeId(region, f"w{i}"), speed)
            for region, speeds in self.regions.items()
            for i, speed in enumerate(speeds)
        )

    @cached_property
    def _by_pair(self) -> dict[tuple[str, str], Link]:
        return {pair: link for link in self.links for pair in (link.between, link.between[::-1])}

    def link(self, a: str, b: str) -> Link | None:
        """The link between regions `a` and `b`, or inside one; None if they are not connected."""
        return self.local if a == b else self._by_pair.get((a, b), self.default)

    def check_reachable(self, peers_of: Iterable[tuple[NodeId, Iterable[NodeId]]]) -> None:
        """Raise a `UserError` that names the first pair of nodes without a link between their
        regions.

        Takes time that grows with nodes and links, not with pairs of nodes.

        Args:
            peers_of: each node, and those that it sends to; one object where many nodes have the
                same peers.
        """
        if self.default is not None:
            return
        known: Iterable[NodeId] = ()
        one_of_each: dict[str, NodeId] = {}  # region: the first of the peers there
        for node, peers in peers_of:
            if peers is not known:
                known, one_of_each = peers, {}
                for peer in peers:
                    one_of_each.setdefault(peer.region, peer)
            for region, peer in one_of_each.items():
                if self.link(node.region, region) is None:
                    raise UserError(
                        f"topology {self.name!r}: {node} cannot reach {peer}: there is no link "
                        f"between regions {node.region!r} and {region!r}; add one under `links`, "
                        "or give a `default` link"
                    )


class Profile(Strict):
    """The size of a training job: what a message that carries the model weighs, and how long a step
    takes.
    """

    name: str = Field("custom", description="what reports call it")
    model_bytes: int = Field(gt=0, description="bytes of one vector of weights on the wire")
    step_time_s: float = Field(gt=0, description="seconds of one inner step on the fastest worker")
    activation_bytes: int = Field(
        0,
        ge=0,
        description="bytes that the batch of one inner step sends over a boundary between stages, "
        "and back as their gradient",
    )


PROFILES = {
    # Pythia-70M in fp32, 64 sequences of 2048 tokens a step on one H100 (HALoS, arXiv 2506.04531).
    # Nobody published it in stages: its activations would be 64 · 2048 · 512 numbers, here taken as
    # bf16.
    "pythia-70m-h100": Profile(
        name="pythia-70m-h100",
        model_bytes=281_706_496,
        step_time_s=0.238391,
        activation_bytes=64 * 2048 * 512 * 2,
    ),
}
MEASURED = "measured"
"""The profile that is measured at the start of a run: this machine, this task."""


HALOS_SPEEDS = (
    (0.232, 0.907, 0.828, 0.347),
    (0.574, 0.531, 0.722, 0.194),
    (0.852, 0.132, 0.896, 0.107),
    (0.827, 0.515, 0.527, 0.788),
)
HALOS_GBIT_S = {
    (0, 1): 0.537,
    (0, 2): 0.935,
    (0, 3): 0.202,
    (1, 2): 0.386,
    (1, 3): 0.117,
    (2, 3): 0.127,
}


def _halos(name: str, *, factor: float = 1.0, counts: tuple[int, ...] = (4, 4, 4, 4)) -> Topology:
    """The network of HALoS' comparison (arXiv 2506.04531); its 16 workers dealt out by `counts`,
    region by region.
    """
    speeds = [speed for region in HALOS_SPEEDS for speed in region]
    regions = {}
    for i, count in enumerate(counts):
        regions[f"r{i}"], speeds = speeds[:count], speeds[count:]
    links = [
        RegionLink(between=(f"r{a}", f"r{b}"), bandwidth_gbit_s=gbit_s * factor)
        for (a, b), gbit_s in HALOS_GBIT_S.items()
    ]
    return Topology(name=name, regions=regions, local=Link(bandwidth_gbit_s=100), links=links)


def _two_regions() -> Topology:
    link = RegionLink(between=("east", "west"), bandwidth_gbit_s=1.0, latency_ms=35)
    regions = {"east": [1.0] * 4, "west": [1.0] * 4}
    return Topology(
        name="two-regions",
        regions=regions,
        local=Link(bandwidth_gbit_s=100, latency_ms=0.1),
        links=[link],
    )


def _internet(nodes: int) -> Topology:
    return Topology(
        name=f"internet-{nodes}",
        regions={f"n{i}": [1.0] for i in range(nodes)},
        default=Link(bandwidth_gbit_s=0.2, latency_ms=50, jitter=0.5),
    )


PRESETS: dict[str, Callable[[], Topology]] = {
    "halos-4x4": lambda: _halos("halos-4x4"),
    "halos-4x4-2x": lambda: _halos("halos-4x4-2x", factor=2),
    "uneven-2-6": lambda: _halos("uneven-2-6", counts=(2, 6, 2, 6)),
    "two-regions": _two_regions,
    "one-node": lambda: Topology(name="one-node", regions={"r0": [1.0]}),
}


def load_topology(spec: str) -> Topology:
    """A topology from a preset's name or a YAML file's path.

    Raises:
        UserError: no such preset or file, or a file that is not a topology.
    """
    if spec in PRESETS:
        return PRESETS[spec]()
    if match := re.fullmatch(r"internet-(\d+)", spec):
        if not 1 <= (nodes := int(match[1])) <= 10_000:
            raise UserError(f"topology {spec!r}: the number of nodes must be from 1 to 10000")
        return _internet(nodes)
    path = Path(spec)
    if path.suffix not in (".yaml", ".yml") and not os.path.isfile(spec):
        known = [*PRESETS, "internet-N"]
        raise UserError(
            f"topology {spec!r} is neither a preset ({', '.join(known)}) nor a YAML "
            f"file{nearest(spec, known)}"
        )
    return parse_topology({"name": path.stem, **read_mapping(path, "topology file")})


def parse_topology(fields: dict[str, Any]) -> Topology:
    """A topology from its fields.

    Raises:
        UserError: one of them is unknown or impossible.
    """
    try:
        return Topology.model_validate(fields)
    except ValidationError as error:
        raise explain(error, "topology", Topology) from None
