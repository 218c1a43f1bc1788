"""A live run over two Ray nodes with token and TLS, on this machine: who belongs where, and that
strangers stay outside.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from archipel.disk import rundir

pytest.importorskip("ray")
pytestmark = [
    pytest.mark.live,
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates"),
]

RECIPE = """
method: {name: noloco, inner_steps: 5}
topology:
  regions: {east: [1.0, 1.0], west: [1.0, 1.0]}
  default: {bandwidth_gbit_s: 1.0}
task: {name: synthetic, width: 16, valid_sequences: 8}
run: {steps: 100, evaluations: 2}
"""

DETACHED = """
method: {name: diloco, inner_steps: 5}
topology: {regions: {east: [1.0]}}
profile: {name: here, model_bytes: 20000, step_time_s: 0.02}
task: {name: synthetic, width: 16, valid_sequences: 8}
run: {steps: 100, evaluations: 2}
live: {pace: profile}
"""


@dataclass
class Cluster:
    """A head that acts region `east`; `join` adds others."""

    folder: Path
    environment: dict[str, str]
    ip: str
    port: int
    nodes: list[subprocess.Popen[bytes]]

    @property
    def address(self) -> str:
        return f"{self.ip}:{self.port}"

    def start(
        self, *options: str, environment: dict[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """`ray start` with `options`; it stays in the foreground, so that ending it ends its
        node.
        """
        command = [
            sys.executable,
            "-m",
            "ray.scripts.scripts",
            "start",
            *options,
            f"--node-ip-address={self.ip}",
            "--num-cpus=1",
            "--block",
        ]
        log = (self.folder / f"node{len(self.nodes)}.log").open("wb")
        node = subprocess.Popen(
            command,
            env=environment or self.environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        log.close()
        self.nodes.append(node)
        return node

    def launch(
        self, *options: str, without: tuple[str, ...] = (), **changes: str
    ) -> tuple[int, str]:
        """Exit code and last line of `archipel launch` in this cluster's environment, or a changed
        one.
        """
        environment = {
            key: value
            for key, value in {**self.environment, **changes}.items()
            if key not in without
        }
        (self.folder / "recipe.yaml").write_text(RECIPE)
        command = [
            sys.executable,
            "-m",
            "archipel.cli",
            "launch",
            str(self.folder / "recipe.yaml"),
            "--address",
            self.address,
            *options,
        ]
        ended = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=240, check=False
        )
        lines = [
            line
            for line in (ended.stderr if ended.returncode else ended.stdout).splitlines()
            if line.strip()
        ]
        return ended.returncode, lines[-1]

    def popen(self, *arguments: str) -> subprocess.Popen[str]:
        """Start `archipel` with `arguments` in this cluster's environment."""
        command = [sys.executable, "-m", "archipel.cli", *arguments, "--address", self.address]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, env=self.environment, cwd=self.folder, stdout=pipe, stderr=pipe, text=True
        )

    def archipel(self, *arguments: str) -> tuple[int, str, str]:
        """Exit code, stdout and stderr of `archipel` with `arguments`."""
        process = self.popen(*arguments)
        out, err = process.communicate(timeout=120)
        return process.returncode, out, err


def own_ip() -> str:
    """This machine's address; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def certificates(folder: Path, ip: str) -> None:
    """A certificate authority and one node's certificate, as in docs/security.md."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    (folder / "names").write_text(f"subjectAltName=IP:{ip},IP:127.0.0.1,DNS:localhost")
    new = ("-newkey", "rsa:2048", "-nodes")
    openssl(
        "req",
        "-x509",
        *new,
        "-days",
        "2",
        "-keyout",
        "ca.key",
        "-out",
        "ca.crt",
        "-subj",
        "/CN=archipel",
    )
    openssl("req", *new, "-keyout", "node.key", "-out", "node.csr", "-subj", "/CN=node")
    signed = (
        "-CA",
        "ca.crt",
        "-CAkey",
        "ca.key",
        "-CAcreateserial",
        "-days",
        "2",
        "-extfile",
        "names",
    )
    openssl("x509", "-req", "-in", "node.csr", *signed, "-out", "node.crt")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    folder, ip = (
        Path(tempfile.mkdtemp(prefix="archipel-")),
        own_ip(),
    )  # sockets' paths must be short
    certificates(folder, ip)
    (folder / "token").write_text(secrets.token_hex(32))
    with socket.socket() as probe:
        probe.bind((ip, 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(folder / "token"),
        "RAY_USE_TLS": "1",
        "RAY_TLS_SERVER_CERT": str(folder / "node.crt"),
        "RAY_TLS_SERVER_KEY": str(folder / "node.key"),
        "RAY_TLS_CA_CERT": str(folder / "ca.crt"),
    }
    cluster = Cluster(folder, environment, ip, port, [])
    cluster.start(
        "--head",
        f"--port={port}",
        "--include-dashboard=false",
        "--labels=region=east",
        f"--temp-dir={folder}/ray",
    )
    try:
        yield cluster
    finally:
        for node in reversed(cluster.nodes):
            node.terminate()
        for node in cluster.nodes:
            node.wait(timeout=60)
        shutil.rmtree(folder, ignore_errors=True)


def test_a_run_goes_on_when_its_command_is_killed_and_attach_shows_its_end(
    cluster: Cluster,
) -> None:
    (cluster.folder / "detached.yaml").write_text(DETACHED)
    with cluster.popen("launch", "detached.yaml", "--detach", "--out", "kept") as command:
        assert command.stderr is not None
        assert next(command.stderr) == f"archipel: diloco-seed0 is being started on {cluster.ip}\n"
        command.kill()  # before the run's process is up
    misspelt = cluster.popen("attach", "dilco-seed0")
    code, out, err = cluster.archipel("attach", "--json")
    assert code == 0, err
    assert (misspelt.communicate(timeout=60)[1], misspelt.returncode) == (
        f"archipel: 'dilco-seed0': no detached run at {cluster.address} has that name; there are: "
        "diloco-seed0 (did you mean 'diloco-seed0'?)\n",
        2,
    )
    run = cluster.folder / "kept/diloco-seed0"
    assert f"archipel: diloco-seed0 is on {cluster.ip}, in {run}\n" in err
    assert "diloco-seed0: 100/100 steps" in err
    [shown], summary = json.loads(out)["runs"], json.loads((run / "summary.json").read_text())
    assert summary["inner_steps"] == 100
    assert {key: shown[key] for key in ("time_s", "inner_steps", "final_loss")} == {
        key: summary[key] for key in ("time_s", "inner_steps", "final_loss")
    }


def test_a_detached_run_is_stopped_and_saved_and_one_that_cannot_begin_says_so(
    cluster: Cluster,
) -> None:
    (cluster.folder / "north.yaml").write_text(DETACHED.replace("east", "north"))
    cannot = cluster.popen("launch", "north.yaml", "--detach", "--out", "north")
    (cluster.folder / "long.yaml").write_text(DETACHED.replace("steps: 100", "steps: 100000"))
    code, out, err = cluster.archipel("launch", "long.yaml", "--detach", "--json", "--out", "long")
    assert code == 0, err
    begun = json.loads(out)
    run = cluster.folder / "long/diloco-seed0"
    assert begun["name"].startswith("diloco-seed0")  # others may have had the name alone
    assert (begun["machine"], begun["directory"]) == (cluster.ip, str(run))
    code, _, err = cluster.archipel("attach", begun["name"], "--stop")
    assert code == 0, err
    assert err.splitlines()[-1] == (
        f"archipel: stopped; `archipel resume {run}` goes on from here; `archipel report {run}` "
        "shows what happened until then"
    )
    assert json.loads((run / "summary.json").read_text())["stopped"] == "interrupted"
    assert rundir.unfinished(run) == [run]
    assert list(run.glob("checkpoint/live/east/w0/event-*"))
    _, err = cannot.communicate(timeout=60)
    assert cannot.returncode == 2
    assert err.splitlines()[-1].startswith("archipel: region 'north' has no machine for north/w0")
    assert not (cluster.folder / "north").exists()


def test_two_nodes_act_two_regions(cluster: Cluster) -> None:
    """First the second one is missing, and the error says how to start it; then it is there."""
    out = cluster.folder / "out"
    code, said = cluster.launch("--out", str(out))
    assert (code, said) == (
        2,
        "archipel: region 'west' has no machine for west/w0, west/w1: no Ray node has the label "
        "region=west (labels found: "
        f"'east'); on a machine of that region: ray start --address={cluster.address} "
        "--labels=region=west",
    )
    cluster.start(f"--address={cluster.address}", "--labels=region=west")
    for _ in range(5):  # it takes a moment to join
        code, said = cluster.launch("--out", str(out))
        if code != 2:
            break
    assert code == 0, said
    summary = json.loads((out / "noloco-seed0/summary.json").read_text())
    assert summary["inner_steps"] == 100
    assert summary["real"].endswith("measured on 2 machines")
    assert summary["slow_link_bytes"] > 0


@pytest.mark.parametrize(
    "changes",
    [{"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_TOKEN": "f" * 64}],
    ids=["no token", "another token"],
)
def test_a_stranger_cannot_join_as_a_driver(cluster: Cluster, changes: dict[str, str]) -> None:
    code, said = cluster.launch(
        "--out", str(cluster.folder / "stranger"), without=("RAY_AUTH_TOKEN_PATH",), **changes
    )
    assert code == 2
    assert said.startswith(
        f"archipel: --address {cluster.address}: cannot join a Ray cluster there, with the "
        "RAY_AUTH_…"
    )
    assert not (cluster.folder / "stranger").exists()


def test_a_stranger_cannot_join_as_a_node(cluster: Cluster) -> None:
    environment = {**cluster.environment, "RAY_AUTH_MODE": "disabled"}
    node = cluster.start(
        f"--address={cluster.address}", "--labels=region=west", environment=environment
    )
    assert node.wait(timeout=120) != 0
