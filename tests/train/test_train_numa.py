"""Ranks keep to one memory node: on made-up hosts, since those that run tests have one node."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from shardwise.train import numa
from shardwise.train.numa import bind, cores_for, node_of, nodes, parse_cores

TWO = {0: frozenset(range(8)), 1: frozenset(range(8, 16))}
ALL = frozenset(range(16))


def host(root: Path, cpulists: dict[int, str], gpus: dict[str, str] | None = None) -> Path:
    for number, text in cpulists.items():
        folder = root / f"sys/devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(text + "\n")
    for place, text in (gpus or {}).items():
        folder = root / "sys/bus/pci/devices" / place
        folder.mkdir(parents=True)
        (folder / "numa_node").write_text(text + "\n")
    return root


def test_lists_of_cores() -> None:
    assert parse_cores("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert parse_cores("\n") == frozenset()


def test_nodes_of_a_host(tmp_path: Path) -> None:
    """Cores of each; a node of memory alone is none for ranks, the tenth is behind the first."""
    host(tmp_path, {0: "0-1,4-5", 10: "2-3", 2: "", 1: "6"})
    assert nodes(tmp_path) == {0: {0, 1, 4, 5}, 1: {6}, 10: {2, 3}}
    assert list(nodes(tmp_path)) == [0, 1, 10]
    assert nodes(tmp_path / "nothing") == {}


@pytest.mark.parametrize(
    ("num_local", "dealt"), [(1, [0]), (2, [0, 1]), (3, [0, 0, 1]), (4, [0, 0, 1, 1])]
)
def test_ranks_without_gpus_are_dealt_in_blocks(num_local: int, dealt: list[int]) -> None:
    found = [cores_for(rank, num_local, ALL, TWO, None) for rank in range(num_local)]
    assert found == [TWO[node] for node in dealt]


def test_a_gpu_says_which_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = SimpleNamespace(pci_domain_id=0, pci_bus_id=0xC1, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: place)
    cuda = torch.device("cuda", 1)
    assert node_of(cuda, tmp_path) is None
    host(tmp_path, {}, {"0000:c1:00.0": "1"})
    assert node_of(cuda, tmp_path) == 1
    (tmp_path / "sys/bus/pci/devices/0000:c1:00.0/numa_node").write_text("-1")
    assert node_of(cuda, tmp_path) is None
    assert cores_for(0, 2, ALL, TWO, 1) == TWO[1]


def test_what_is_left_alone() -> None:
    assert cores_for(0, 1, ALL, {0: ALL}, None) is None, "one node"
    assert cores_for(0, 2, frozenset(range(4)), TWO, None) is None, "bound to one node already"
    assert cores_for(0, 2, frozenset({1, 9}), TWO, None) == {1}, "bound to cores of both"
    assert cores_for(0, 2, ALL, TWO, 5) is None, "a node without cores"


def test_the_process_is_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        pytest.skip("one core")
    first, second = allowed[0], ",".join(map(str, allowed[1:]))
    host(tmp_path, {0: str(first), 1: second})
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    try:
        for rank, expected in ((0, {first}), (1, set(allowed[1:]))):
            monkeypatch.setenv("LOCAL_RANK", str(rank))
            os.sched_setaffinity(0, allowed)
            assert numa.bind(torch.device("cpu"), tmp_path) == expected
            assert os.sched_getaffinity(0) == expected
            assert bind(torch.device("cpu"), tmp_path) is None, "it is bound now"
    finally:
        os.sched_setaffinity(0, allowed)
