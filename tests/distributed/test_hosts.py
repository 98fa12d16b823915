"""Several hosts, as network namespaces of this machine: torchrun on each, one rank per host, no shared loopback."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.distributed.test_ranks import ENVIRONMENT, RESTARTED, SCRIPT, charges, killed_run, launch, same, weights

IP = shutil.which("ip")
HOSTS = ("10.203.7.1", "10.203.7.2")


def ip(*words: str, check: bool = True) -> bool:
    done = subprocess.run([str(IP), *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0 or not check, done.stderr
    return done.returncode == 0


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Two namespaces with an interface `net0` each, joined by a cable."""
    names = [f"tacit-{os.getpid()}-{place}" for place in range(2)]
    if IP is None or not all(ip("netns", "add", name, check=False) for name in names):
        pytest.skip("network namespaces need iproute2 and the right to make them (root)")
    try:
        ip("link", "add", "net0", "netns", names[0], "type", "veth", "peer", "name", "net0", "netns", names[1])
        for name, address in zip(names, HOSTS, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "net0")
            ip("-n", name, "link", "set", "net0", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            ip("netns", "del", name, check=False)


def launch_on(hosts: list[str], folder: Path, dies: str, restarts: int) -> None:
    folder.mkdir()
    path = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    settings = os.environ | ENVIRONMENT | RESTARTED | {"GLOO_SOCKET_IFNAME": "net0", "PYTHONPATH": path}
    started = []
    for name, address in zip(hosts, HOSTS, strict=True):
        first = str(address == HOSTS[0]).lower()
        command = [str(IP), "netns", "exec", name, sys.executable, "-m", "torch.distributed.run", "--nnodes=2"]
        command += ["--nproc-per-node=1", f"--max-restarts={restarts}", "--rdzv-backend=c10d", "--rdzv-id=run"]
        command += [f"--rdzv-conf=is_host={first}", f"--rdzv-endpoint={HOSTS[0]}:29400"]
        command += [f"--local-addr={address}", str(SCRIPT), str(folder), "4", dies]
        started.append(subprocess.Popen(command, env=settings, stderr=subprocess.PIPE, text=True))
    for agent in started:
        _, said = agent.communicate(timeout=1200)
        print(said[-4000:])
        assert agent.returncode == 0


@pytest.mark.slow
def test_two_hosts_make_the_run_of_one(hosts: list[str], tmp_path: Path) -> None:
    assert launch(tmp_path / "one", 2)
    launch_on(hosts, tmp_path / "two", "never", 0)
    for rank in range(2):
        assert same(weights(tmp_path / "one", rank), weights(tmp_path / "two", rank))
    assert charges(tmp_path / "one") == charges(tmp_path / "two")


@pytest.mark.slow
def test_a_rank_that_dies_on_another_host_changes_nothing(hosts: list[str], tmp_path: Path) -> None:
    """Its own agent restarts it; the agent of the other host joins it in a new round."""
    assert launch(tmp_path / "one", 2)
    launch_on(hosts, tmp_path / "two", "follower", 2)
    killed_run(tmp_path / "two", tmp_path / "one")
