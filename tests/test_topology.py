"""`topology.py`: presets carry the published numbers, files are read strictly, and each mistake has
its own line.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from archipel.actor import NodeId
from archipel.errors import UserError
from archipel.sim.topology import PRESETS, PROFILES, Link, Topology, load_topology, parse_topology

TWO: dict[str, Any] = {"regions": {"north": [1.0], "south": [1.0]}}
"""The fields of a topology of two regions that are not linked."""


def problem(fields: dict[str, Any]) -> str:
    """What `parse_topology` says against `fields`."""
    with pytest.raises(UserError) as error:
        parse_topology(fields)
    return str(error.value)


def written(folder: Path, text: str, name: str = "net.yaml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


# Presets


def test_halos_has_the_published_speeds() -> None:
    assert load_topology("halos-4x4").regions == {
        "r0": [0.232, 0.907, 0.828, 0.347],
        "r1": [0.574, 0.531, 0.722, 0.194],
        "r2": [0.852, 0.132, 0.896, 0.107],
        "r3": [0.827, 0.515, 0.527, 0.788],
    }


@pytest.mark.parametrize(
    ("a", "b", "gbit_s"),
    [
        (0, 1, 0.537),
        (0, 2, 0.935),
        (0, 3, 0.202),
        (1, 2, 0.386),
        (1, 3, 0.117),
        (2, 3, 0.127),
        (0, 0, 100),
        (3, 3, 100),
    ],
)
def test_halos_has_the_published_links_both_ways(a: int, b: int, gbit_s: float) -> None:
    topology = load_topology("halos-4x4")
    for link in (topology.link(f"r{a}", f"r{b}"), topology.link(f"r{b}", f"r{a}")):
        assert link is not None
        assert (link.bandwidth_gbit_s, link.latency_ms, link.jitter) == (gbit_s, 0, 0)


def test_the_published_simulators_rules_are_the_default() -> None:
    topology = load_topology("halos-4x4")
    assert (topology.sharing, topology.collective) == ("none", "ring")


def test_the_2x_preset_doubles_the_links_between_regions_only() -> None:
    plain, double = load_topology("halos-4x4"), load_topology("halos-4x4-2x")
    for a, b in combinations(plain.regions, 2):
        assert double.link(a, b).bandwidth_gbit_s == 2 * plain.link(a, b).bandwidth_gbit_s
    assert double.local == plain.local
    assert double.regions == plain.regions


def test_the_uneven_preset_deals_the_same_workers_out_two_and_six() -> None:
    plain, uneven = load_topology("halos-4x4"), load_topology("uneven-2-6")
    assert [len(speeds) for speeds in uneven.regions.values()] == [2, 6, 2, 6]
    assert [w.speed for w in uneven.workers] == [w.speed for w in plain.workers]


def test_internet_n_has_n_single_workers_all_linked_alike() -> None:
    topology = load_topology("internet-5")
    assert topology.regions == {f"n{i}": [1.0] for i in range(5)}
    assert len({topology.link(a, b) for a, b in combinations(topology.regions, 2)}) == 1
    assert topology.link("n0", "n4") == Link(bandwidth_gbit_s=0.2, latency_ms=50, jitter=0.5)


@pytest.mark.parametrize("name", [*PRESETS, "internet-1", "internet-64"])
def test_a_preset_carries_its_name_and_links_all_its_workers(name: str) -> None:
    topology = load_topology(name)
    assert topology.name == name
    workers = [worker.id for worker in topology.workers]
    topology.check_reachable((me, workers) for me in workers)


def test_the_profile_has_the_published_size_and_step_time() -> None:
    profile = PROFILES["pythia-70m-h100"]
    assert (profile.model_bytes, profile.step_time_s) == (281_706_496, 0.238391)


# What a topology says


def test_workers_are_ranked_region_by_region() -> None:
    topology = parse_topology({"regions": {"b": [0.5, 1], "empty": [], "a": [0.25]}})
    assert [(str(worker.id), worker.speed) for worker in topology.workers] == [
        ("b/w0", 0.5),
        ("b/w1", 1),
        ("a/w0", 0.25),
    ]


def test_units_are_bytes_and_seconds() -> None:
    link = Link(bandwidth_gbit_s=0.8, latency_ms=35)
    assert (link.bandwidth_bytes_per_s, link.latency_s) == (1e8, 0.035)


def test_a_named_link_comes_before_the_default() -> None:
    fields = {
        "regions": {"a": [1], "b": [1], "c": [1]},
        "links": [{"between": ["a", "b"], "bandwidth_gbit_s": 3}],
    }
    topology = parse_topology({**fields, "default": {"bandwidth_gbit_s": 1}})
    assert topology.link("b", "a").bandwidth_gbit_s == 3
    assert topology.link("c", "a").bandwidth_gbit_s == 1


def test_without_a_default_other_regions_are_not_linked() -> None:
    assert parse_topology(TWO).link("north", "south") is None


# Files


def test_a_file_is_read(tmp_path: Path) -> None:
    text = """
    regions: {north: [1.0, 0.5], south: [2]}
    local: {bandwidth_gbit_s: 10, latency_ms: 1e-1}
    links:
      - {between: [north, south], bandwidth_gbit_s: 1e-3, latency_ms: 20, jitter: 0.5}
    sharing: fair
    collective: tree
    """
    topology = load_topology(written(tmp_path, text))
    assert topology.regions == {"north": [1.0, 0.5], "south": [2.0]}
    assert topology.link("south", "south") == Link(bandwidth_gbit_s=10, latency_ms=0.1)
    link = topology.link("south", "north")
    assert link is not None
    assert (link.bandwidth_gbit_s, link.latency_ms, link.jitter) == (0.001, 20, 0.5)
    assert (topology.sharing, topology.collective) == ("fair", "tree")


def test_a_file_is_called_by_its_name_unless_it_says_another(tmp_path: Path) -> None:
    assert load_topology(written(tmp_path, "regions: {a: [1]}")).name == "net"
    assert load_topology(written(tmp_path, "{name: mine, regions: {a: [1]}}")).name == "mine"


def test_a_file_needs_no_suffix_if_it_is_there(tmp_path: Path) -> None:
    assert load_topology(written(tmp_path, "regions: {a: [1]}", "net")).regions == {"a": [1.0]}


def test_a_topology_survives_its_own_fields() -> None:
    for name in (*PRESETS, "internet-3"):
        assert parse_topology(load_topology(name).model_dump(mode="json")) == load_topology(name)


# Mistakes


def test_an_unknown_preset_names_the_nearest() -> None:
    with pytest.raises(UserError) as error:
        load_topology("halos-4x3")
    assert str(error.value) == (
        "topology 'halos-4x3' is neither a preset (halos-4x4, halos-4x4-2x, uneven-2-6, "
        "two-regions, one-node, internet-N) "
        "nor a YAML file (did you mean 'halos-4x4'?)"
    )


def test_a_missing_file_is_called_missing(tmp_path: Path) -> None:
    path = tmp_path / "nowhere.yaml"
    with pytest.raises(UserError) as error:
        load_topology(str(path))
    assert str(error.value) == f"topology file {path}: No such file or directory"


@pytest.mark.parametrize("name", ["internet-0", "internet-10001"])
def test_internet_n_has_bounds(name: str) -> None:
    with pytest.raises(UserError) as error:
        load_topology(name)
    assert str(error.value) == f"topology {name!r}: the number of nodes must be from 1 to 10000"


def test_a_file_that_is_not_yaml_is_one_line(tmp_path: Path) -> None:
    path = written(tmp_path, "regions: [1.0\nlinks: {")
    with pytest.raises(UserError) as error:
        load_topology(path)
    assert str(error.value).startswith(f"topology file {path} is not YAML: while parsing")
    assert "\n" not in str(error.value)


def test_a_file_that_is_not_a_mapping_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, "- a\n- b\n")
    with pytest.raises(UserError) as error:
        load_topology(path)
    assert str(error.value) == f"topology file {path}: expected `key: value` lines, found a list"


def test_an_unknown_key_names_the_nearest_and_all() -> None:
    assert problem({**TWO, "shared": "fair"}) == (
        "topology.shared: unknown key 'shared' (did you mean 'sharing'?); "
        "allowed: name, regions, local, links, default, sharing, collective"
    )


@pytest.mark.parametrize(
    ("where", "fields"),
    [
        (
            "topology.local.bandwith_gbit_s",
            {"local": {"bandwidth_gbit_s": 1, "bandwith_gbit_s": 1}},
        ),
        (
            "topology.default.bandwith_gbit_s",
            {"default": {"bandwidth_gbit_s": 1, "bandwith_gbit_s": 1}},
        ),
    ],
)
def test_an_unknown_key_of_a_link_says_where_it_is(where: str, fields: dict[str, Any]) -> None:
    assert problem({**TWO, **fields}) == (
        f"{where}: unknown key 'bandwith_gbit_s' (did you mean 'bandwidth_gbit_s'?); allowed: "
        "bandwidth_gbit_s, latency_ms, jitter, overhead"
    )


def test_an_unknown_key_of_a_link_between_regions_says_which_link() -> None:
    link = {"between": ["north", "south"], "bandwidth_gbit_s": 1, "latency": 3}
    assert problem({**TWO, "links": [link]}) == (
        "topology.links.0.latency: unknown key 'latency' (did you mean 'latency_ms'?); "
        "allowed: bandwidth_gbit_s, latency_ms, jitter, overhead, between"
    )


@pytest.mark.parametrize(
    ("link", "text"),
    [
        ({"bandwidth_gbit_s": 0}, "bandwidth_gbit_s = 0: should be greater than 0"),
        ({"bandwidth_gbit_s": -1}, "bandwidth_gbit_s = -1: should be greater than 0"),
        ({"bandwidth_gbit_s": float("inf")}, "bandwidth_gbit_s = inf: should be a finite number"),
        ({"bandwidth_gbit_s": float("nan")}, "bandwidth_gbit_s = nan: should be a finite number"),
        (
            {"bandwidth_gbit_s": 1, "latency_ms": -1},
            "latency_ms = -1: should be greater than or equal to 0",
        ),
        (
            {"bandwidth_gbit_s": 1, "jitter": -0.1},
            "jitter = -0.1: should be greater than or equal to 0",
        ),
        ({"bandwidth_gbit_s": [1]}, "bandwidth_gbit_s = [1]: should be a valid number"),
        ({}, "bandwidth_gbit_s: this key is required"),
    ],
)
def test_a_link_must_be_possible(link: dict[str, Any], text: str) -> None:
    assert (
        problem({**TWO, "links": [{"between": ["north", "south"], **link}]})
        == f"topology.links.0.{text}"
    )


@pytest.mark.parametrize("speed", [0, -1.0])
def test_a_speed_must_be_above_zero(speed: float) -> None:
    assert (
        problem({"regions": {"a": [1.0, speed]}})
        == f"topology.regions.a.1 = {speed!r}: should be greater than 0"
    )


def test_there_must_be_regions() -> None:
    assert problem({}) == "topology.regions: this key is required"
    assert problem({"regions": {}}).startswith(
        "topology.regions = {}: Dictionary should have at least 1 item"
    )


def test_there_must_be_workers() -> None:
    assert problem({"regions": {"a": [], "b": []}}) == (
        "topology.regions: there are no workers: give at least one region a list of speeds such as "
        "[1.0, 0.5]"
    )


@pytest.mark.parametrize("name", ["a/b", "", "a b", "a\nb"])
def test_a_region_name_must_be_plain(name: str) -> None:
    assert problem({"regions": {name: [1.0]}}) == (
        f"topology.regions: region name {name!r}: use letters, digits, '.', '_' and '-'"
    )


def test_a_link_to_an_unknown_region_names_the_nearest() -> None:
    assert problem({**TWO, "links": [{"between": ["north", "sout"], "bandwidth_gbit_s": 1}]}) == (
        "topology: link between ('north', 'sout'): unknown region 'sout' (did you mean 'south'?)"
    )


def test_a_link_given_twice_is_refused_in_either_direction() -> None:
    links = [
        {"between": list(pair), "bandwidth_gbit_s": 1}
        for pair in (("north", "south"), ("south", "north"))
    ]
    assert (
        problem({**TWO, "links": links})
        == "topology: link between ('south', 'north') is given twice"
    )


def test_a_link_to_itself_is_refused() -> None:
    assert problem({**TWO, "links": [{"between": ["north", "north"], "bandwidth_gbit_s": 1}]}) == (
        "topology: link between ('north', 'north'): a region's own link is set under `local`"
    )


@pytest.mark.parametrize(
    ("key", "text"), [("sharing", "'none' or 'fair'"), ("collective", "'ring', 'tree' or 'chain'")]
)
def test_a_choice_names_what_is_allowed(key: str, text: str) -> None:
    assert problem({**TWO, key: "maybe"}) == f"topology.{key} = 'maybe': should be {text}"


def test_numbers_in_quotes_and_truth_values_are_not_numbers() -> None:
    for value in ("1", True):
        with pytest.raises(UserError, match=r"topology\.local\.bandwidth_gbit_s = "):
            parse_topology({**TWO, "local": {"bandwidth_gbit_s": value}})
        with pytest.raises(UserError, match=r"topology\.regions\.a\.0 = "):
            parse_topology({"regions": {"a": [value]}})


def test_nodes_that_cannot_reach_each_other_are_named_with_the_way_out() -> None:
    topology = parse_topology({"name": "split", **TWO})
    here, there = NodeId("north", "w0"), NodeId("south", "server")
    with pytest.raises(UserError) as error:
        topology.check_reachable([(here, [NodeId("north", "w1"), there])])
    assert str(error.value) == (
        "topology 'split': north/w0 cannot reach south/server: there is no link between regions "
        "'north' and 'south'; "
        "add one under `links`, or give a `default` link"
    )


def test_a_default_link_makes_all_reachable() -> None:
    topology = Topology(**TWO, default=Link(bandwidth_gbit_s=1))
    topology.check_reachable([(NodeId("north", "w0"), [NodeId("south", "w0")])])


def test_who_can_reach_whom_is_a_matter_of_regions() -> None:
    """10,000 workers that all know each other, in four regions with a link missing;
    the first pair without one is named, and 10⁸ pairs are not looked at.
    """
    pairs = [("a", "b"), ("b", "c"), ("c", "d"), ("d", "a"), ("a", "c")]
    topology = parse_topology(
        {
            "regions": {name: [1.0] * 2500 for name in "abcd"},
            "links": [{"between": pair, "bandwidth_gbit_s": 1} for pair in pairs],
        }
    )
    looked_at = 0

    class Counted(tuple[NodeId, ...]):
        def __iter__(self) -> Iterator[NodeId]:
            nonlocal looked_at
            looked_at += len(self)
            return super().__iter__()

    everybody = Counted(worker.id for worker in topology.workers)
    with pytest.raises(UserError, match="b/w0 cannot reach d/w0"):
        topology.check_reachable((worker.id, everybody) for worker in topology.workers)
    assert looked_at == 10_000
