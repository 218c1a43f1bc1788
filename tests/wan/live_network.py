"""A live run over network namespaces: a Ray node in each region, and the command in one of its own.

    with LiveNetwork(mbit_s=50, latency_ms=5) as live:
        run = live.launch(recipe)
        live.network.set_up("east", "west", up=False)
        summary = run.summary()

What belongs here: Ray nodes, the command, and what it has left. What does not: namespaces and links
(`network.py`).

The command and Ray's head are in a region `home` without workers, so that a cut between `east` and
`west` leaves the command with both.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import yaml
from network import Network

from archipel.sim.topology import parse_topology

PORT = 6390
START_S = 60.0


class LiveNetwork:
    """Namespaces `home`, `east` and `west`, each with a Ray node, while it is open as a context.

    Args:
        mbit_s, latency_ms: of all links that `links` does not name.
        others: more of them, with a Ray node each.
        links: as in a topology file.
    """

    def __init__(
        self,
        mbit_s: float = 50.0,
        latency_ms: float = 0.0,
        others: tuple[str, ...] = (),
        links: Sequence[dict[str, Any]] = (),
    ) -> None:
        self.regions = ("home", "east", "west", *others)
        topology = parse_topology(
            {
                "regions": {region: [1.0] for region in self.regions},
                "links": list(links),
                "default": {"bandwidth_gbit_s": mbit_s / 1e3, "latency_ms": latency_ms},
            }
        )
        self.network = Network(topology)
        self.environment = {
            **os.environ,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_ENABLE_AUTO_CONNECT": "0",
        }

    def __enter__(self) -> LiveNetwork:
        with ExitStack() as stack:
            # A short path: Ray's sockets lie in it.
            self.folder = Path(tempfile.mkdtemp(prefix="wan", dir="/tmp"))
            stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
            stack.enter_context(self.network)
            self.stack = stack
            head = ("--head", f"--port={PORT}", "--include-dashboard=false")
            self._start("home", *head, f"--temp-dir={self.folder}/ray")
            for region in self.regions[1:]:
                self._start(region, f"--address={self.address}")
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    @property
    def address(self) -> str:
        return f"{self.network.address('home')}:{PORT}"

    def _start(self, region: str, *options: str) -> None:
        log = self.stack.enter_context((self.folder / f"{region}.log").open("wb"))
        node = self.network.popen(
            region,
            [
                *(sys.executable, "-m", "ray.scripts.scripts", "start", *options, "--block"),
                f"--node-ip-address={self.network.address(region)}",
                *("--num-cpus=4", "--object-store-memory=100000000", "--disable-usage-stats"),
                f"--labels=region={region}",
            ],
            env=self.environment,
            stdout=log,
            stderr=log,
        )
        self.stack.callback(self._stop, node)
        end_s = time.monotonic() + START_S
        while b"Ray runtime started" not in (self.folder / f"{region}.log").read_bytes():
            assert node.poll() is None, (self.folder / f"{region}.log").read_text()
            assert time.monotonic() < end_s, (self.folder / f"{region}.log").read_text()
            time.sleep(0.1)

    @staticmethod
    def _stop(node: subprocess.Popen[Any]) -> None:
        node.terminate()
        try:
            node.wait(10)
        except subprocess.TimeoutExpired:
            node.kill()
            node.wait()

    def hosts(self, region: str) -> list[int]:
        """The processes of the hosts in a region that run now."""
        found = []
        for pid in self.network.processes(region):
            with suppress(FileNotFoundError, ProcessLookupError):
                if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::RayHost"):
                    found.append(pid)
        return sorted(found)

    def launch(
        self, recipe: dict[str, Any], name: str = "run", *options: str, region: str = "home"
    ) -> LiveRun:
        """Begin a run, with more `options`; its directory is in a folder of that name."""
        path, out = self.folder / f"{name}.yaml", self.folder / name
        path.write_text(yaml.safe_dump(recipe))
        arguments = ["launch", str(path), "--out", str(out), *options]
        return self.archipel(name, *arguments, region=region)

    def archipel(self, name: str, *arguments: str, region: str = "home") -> LiveRun:
        """Begin a command in a region; the run that it is about is in the folder `name`."""
        command = [sys.executable, "-m", "archipel.cli", *arguments, "--insecure"]
        out = self.folder / name
        process = self.network.popen(
            region,
            [*command, "--address", self.address],
            env=self.environment,
            stdout=self.stack.enter_context((self.folder / f"{name}.out").open("wb")),
            stderr=self.stack.enter_context((self.folder / f"{name}.err").open("wb")),
        )
        run = LiveRun(process, out, self.folder / f"{name}.err")
        self.stack.callback(run.end)
        return run


def recipe_of(
    method: str, workers: int, inner_steps: int, step_time_s: float, **sections: Any
) -> dict[str, Any]:
    """So many workers in each of two regions, a small model, and inner steps of a known time."""
    settings: dict[str, Any] = {} if method == "sync_sgd" else {"inner_steps": inner_steps}
    if method == "halos":
        settings |= {"accumulate": workers}
    return {
        "method": {"name": method, **settings},
        "topology": {
            "regions": {"east": [1.0] * workers, "west": [1.0] * workers},
            "default": {"bandwidth_gbit_s": 0.05},
        },
        "task": {
            "name": "synthetic",
            "width": 16,
            "layers": 1,
            "heads": 2,
            "sequence": 16,
            "batch_size": 2,
            "valid_sequences": 8,
        },
        "profile": {"name": "here", "model_bytes": 20000, "step_time_s": step_time_s},
        **sections,
    }


class LiveRun:
    """A run that goes on, or has ended."""

    def __init__(self, process: subprocess.Popen[Any], out: Path, errors: Path) -> None:
        self.process, self.out, self.errors = process, out, errors

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait()

    def said(self) -> str:
        """All that the command has said so far of progress and trouble."""
        return self.errors.read_text()

    def until(self, holds: Callable[[str], bool], within_s: float) -> None:
        """Wait until something holds of what the command has said."""
        end_s = time.monotonic() + within_s
        while not holds(self.said()):
            assert self.process.poll() is None, self.said()[-3000:]
            assert time.monotonic() < end_s, self.said()[-3000:]
            time.sleep(0.1)

    def summary(self, within_s: float = 120.0) -> dict[str, Any]:
        """What the run has left, when it has ended."""
        try:
            self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it has not ended: {self.said()[-3000:]}") from None
        assert self.process.returncode == 0, self.said()[-3000:]
        [path] = self.out.glob("**/summary.json")
        found: dict[str, Any] = json.loads(path.read_text())
        return found
