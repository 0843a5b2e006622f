"""Hosts are found, the mesh is held against them, and a slow link between them is told with what it
costs."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
from pathlib import Path

import jobs
import pytest
from jobs import TINY, run_job

from beside import from_benchmarks
from ranks import on_ranks
from shardwise.doctor.run.case import Case
from shardwise.doctor.run.checks import examine
from shardwise.errors import ConfigError
from shardwise.layout import Collective, Moment
from shardwise.train import link
from shardwise.train.config import Config, MeshConfig, ShardConfig
from shardwise.train.hosts import Host, crosses_hosts, describe_mesh, host_problems, hosts_of


def placed(*names: str) -> tuple[Host, ...]:
    """One rank after another on the hosts of these names."""
    return hosts_of([("", name) for name in names])


def mesh_of(replicate: int, shard: int = -1, strategy: str = "auto") -> Config:
    mesh = MeshConfig(replicate=replicate, shard=shard)
    return Config(mesh=mesh, shard=ShardConfig(strategy=strategy))


def test_hosts_are_nodes_of_the_launcher_or_have_a_name_each() -> None:
    assert placed("a", "a", "b") == (Host("a", (0, 1)), Host("b", (2,)))
    assert placed("a", "b", "a") == (Host("a", (0, 2)), Host("b", (1,)))
    nodes = hosts_of([("0", "a"), ("0", "a"), ("1", "b"), ("1", "b")])
    assert nodes == (Host("a", (0, 1)), Host("b", (2, 3)))
    same = hosts_of([("0", "pod"), ("1", "pod")])  # two agents; or machines of one name
    assert [host.name for host in same] == ["pod node 0", "pod node 1"]
    assert hosts_of([("0", "a"), ("", "a")]) == (Host("a", (0, 1)),)  # not all know their node


@pytest.mark.parametrize(
    ("replicate", "shard", "names", "said"),
    [
        (2, -1, "aabb", None),
        (4, -1, "aabb", None),  # two copies on each
        (2, -1, "aaaa", None),
        (2, 4, "aabbccdd", None),  # two hosts for a copy, and the configuration says so
        (1, -1, "aabb", None),  # full_shard: not asked to stay inside
        (
            2, -1, "aabbccdd",
            ("2 replicas of 4 ranks: under hybrid_shard ranks 0-3 share a copy of the model, but "
            "run on 2 hosts: a (ranks 0, 1), b (ranks 2, 3); use mesh.replicate = 4, a copy for "
            "each host, or mesh.shard = 4 to mean it"),
        ),
        (
            2, -1, "abab",
            ("2 replicas of 2 ranks: under hybrid_shard ranks 0, 1 share a copy of the model, but "
            "run on 2 hosts: a (rank 0), b (rank 1); start the ranks host by host, so that those "
            "of a host follow each other (srun: --distribution=block)"),
        ),
        (
            2, -1, "aaab",
            ("2 replicas of 2 ranks: under hybrid_shard ranks 2, 3 share a copy of the model, but "
            "run on 2 hosts: a (rank 2), b (rank 3); hosts have unlike numbers of ranks (3, 1): "
            "start as many on each, or use full_shard"),
        ),
        (
            3, 2, "aaabbb",
            ("3 replicas of 2 ranks: under hybrid_shard ranks 2, 3 share a copy of the model, but "
            "run on 2 hosts: a (rank 2), b (rank 3); use mesh.replicate = 2, a copy for each host"),
        ),
    ],
)  # fmt: skip
def test_copies_stay_inside_hosts(replicate: int, shard: int, names: str, said: str) -> None:
    found = host_problems(mesh_of(replicate, shard), placed(*names))
    assert found == ([] if said is None else [("mesh.replicate", said)])


def test_ranks_of_a_wire_format_by_hosts_are_those_of_hosts() -> None:
    config = Config(shard=ShardConfig(strategy="full_shard", host_ranks=4))
    assert host_problems(config, placed(*"aaaabbbb")) == []
    assert host_problems(config, placed(*"aaaa")) == []
    ((key, said),) = host_problems(config, placed(*"aabbccdd"))
    assert key == "shard.host_ranks" and said == (
        "4, but ranks 0-3 run on 2 hosts: a (ranks 0, 1), b (ranks 2, 3); name how many each host "
        "has"
    )


def test_the_mesh_in_a_line() -> None:
    two = placed(*"aabb")
    assert describe_mesh(mesh_of(2), two) == (
        "mesh: 2 replicas x 2 shards on 2 hosts: a (ranks 0, 1), b (ranks 2, 3); gathers inside "
        "hosts only"
    )
    assert describe_mesh(mesh_of(1), two).startswith("mesh: 1 replica x 4 shards on 2 hosts")
    assert describe_mesh(mesh_of(1), two).endswith("gathers between hosts")
    assert describe_mesh(mesh_of(1, strategy="no_shard"), two).startswith("mesh: 4 replicas x 1")
    assert describe_mesh(mesh_of(2), placed(*"aaaa")) == "mesh: 2 replicas x 2 shards on one host"
    assert describe_mesh(mesh_of(1), placed(*"aaaa")) == ""
    many = placed(*(f"host{i // 4}" for i in range(400)))
    line = describe_mesh(mesh_of(100), many)
    assert "host0 (ranks 0-3)" in line and "and 92 more" in line and len(line) < 300
    assert [crosses_hosts(mesh_of(n), two) for n in (1, 2, 4)] == [True, False, False]
    assert not crosses_hosts(mesh_of(1, strategy="no_shard"), two)
    assert crosses_hosts(mesh_of(2, 4), placed(*"aabbccdd"))


@on_ranks(4)
def test_a_copy_on_two_hosts_is_refused_before_anything_is_written(rank, tmp_path):
    os.environ["GROUP_RANK"] = str(rank % 2)
    with pytest.raises(ConfigError, match=r"mesh\.replicate: .*ranks 0, 1 share a copy"):
        run_job(tmp_path / "run", mesh__replicate=2, train__micro_batch=1)
    assert not (tmp_path / "run").exists()


@on_ranks(4)
def test_the_mesh_is_printed_and_kept(rank, tmp_path):
    os.environ["GROUP_RANK"] = str(rank // 2)
    run = tmp_path / "run"
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        run_job(run, mesh__replicate=2, train__micro_batch=1, train__steps=4)
    if rank == 0:
        assert "node 1 (ranks 2, 3); gathers inside hosts only" in shown.getvalue()
        rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
        (hosts,) = [row["hosts"] for row in rows if row["event"] == "hosts"]
        assert [host["ranks"] for host in hosts] == [[0, 1], [2, 3]]
        assert not [row for row in rows if row["event"] == "link"]


def cost_of(run: Path) -> dict:
    return Case(run).link


@pytest.mark.parametrize("probe_s", [1e-6, 60.0], ids=["fast", "slow"])
@on_ranks(2)
def test_the_cost_of_a_link_is_told_where_it_is_slow(rank, tmp_path, probe_s):
    os.environ["GROUP_RANK"] = str(rank)
    run = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        measured = link._probe_s
        patch.setattr(link, "_probe_s", lambda *where: measured(*where) * 0 + probe_s)
        run_job(run, shard__strategy="full_shard", train__steps=6, shard__transport="c10d")
    if rank:
        return
    cost, warned = cost_of(run), run / "warnings" / "rank_00000.log"
    params = _params_of_tiny()
    # 3 micro-batches: each gathers all twice (the root perhaps once) and reduces it once, which on
    # Gloo moves twice as much; between two ranks half of that passes each way.
    assert 3 * 3 * params * 4 / 2 < cost["link_bytes"] < 3 * 4.4 * params * 4 / 2
    assert cost["hybrid_bytes"] == pytest.approx(3 * params * 4, rel=0.05)
    assert cost["link_s"] == pytest.approx(
        cost["link_bytes"] / (2**22 / probe_s), rel=1e-3, abs=1e-9
    )
    findings = [finding.name for finding in examine(Case(run))]
    if probe_s < 1:
        assert not warned.exists() and "slow-link" not in findings
        return
    text = warned.read_text()
    assert re.search(r"full_shard between 2 hosts: .* a step through a link of .*/s \(mea", text)
    assert "hybrid_shard with mesh.replicate = 2 would move" in text
    assert "slow-link" in findings and "communication" not in findings


def planned(kind: str, size: int, ranks: int = 0, is_inside: bool = False) -> Collective:
    return Collective(kind, "shard", Moment.FORWARD, size, ranks, is_inside)


def test_bytes_out_of_a_host() -> None:
    """Of 2 hosts with 4 ranks each, by hand."""
    ring = planned("gather", 100), planned("reduce", 800)
    assert [link.out_of_host(c, 8, 2, False) for c in ring] == [700, 700]
    # Each of 4 ranks sends an eighth to each of 4 ranks there.
    assert link.out_of_host(planned("reduce", 800), 8, 2, True) == 4 * 4 * 100
    assert link.out_of_host(planned("reduce", 800, 4, is_inside=True), 8, 2, True) == 0
    # Between hosts: 4 ranks send half of what they have summed up, or get one part each.
    assert link.out_of_host(planned("reduce", 200, 2), 8, 2, True) == 4 * 100
    assert link.out_of_host(planned("gather", 100, 2), 8, 2, False) == 4 * 100


@on_ranks(2)
def test_a_wire_format_shortens_what_is_told(rank, tmp_path):
    os.environ["GROUP_RANK"] = str(rank)
    plain = {"shard__strategy": "full_shard", "train__steps": 3, "shard__transport": "c10d"}
    wired = {"shard__gather_wire": "int8", "shard__reduce_wire": "int8"}
    run_job(tmp_path / "plain", **plain)
    run_job(tmp_path / "wired", **plain, **wired)
    if rank == 0:
        exact, narrow = (cost_of(tmp_path / name) for name in ("plain", "wired"))
        # A quarter, of reductions an eighth: Gloo's all-reduce moves twice as much.
        assert 0.12 < narrow["link_bytes"] / exact["link_bytes"] < 0.26
        assert narrow["hybrid_bytes"] == pytest.approx(exact["hybrid_bytes"] / 4, rel=0.1)


def _params_of_tiny() -> int:
    from shardwise.train.config_file import load_config
    from shardwise.train.model import build_model

    loaded = load_config(None, [(key, str(value)) for key, value in TINY.items()])
    return sum(p.numel() for p in build_model(loaded.config, None).parameters())


testbed, two_hosts = from_benchmarks("testbed"), from_benchmarks("two_hosts")
ABSENT = testbed.why_not()


@pytest.mark.skipif(bool(ABSENT), reason=ABSENT or "never")
@pytest.mark.long
def test_a_job_on_two_hosts_with_a_slow_cable(tmp_path: Path) -> None:
    """A real cable of 50 Mbit/s, torchrun on both sides."""
    text, run = jobs.text_file(tmp_path), tmp_path / "run"
    keys = TINY | {"data.source": text, "run.dir": run, "run.device": "cpu", "model.dim": 128}
    keys |= {"train.steps": 3, "log.trackers": "none", "train.micro_batch": 6}
    words = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    with testbed.TwoHosts(testbed.Profile(0.05)) as bed:
        launchers = [
            two_hosts.start(host, bed, 1, "-m", "shardwise.train", *words, output=subprocess.PIPE)
            for host in bed.hosts
        ]
        shown = [launcher.communicate(timeout=120)[0].decode() for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0], shown
    assert re.search(r"mesh: 1 replica x 2 shards on 2 hosts: \S+-0 \(rank 0\), \S+-1", shown[0])
    assert "(measured) are" in shown[0] and "hybrid_shard with mesh.replicate = 2" in shown[0]
    cost = cost_of(run)
    # A ring has both directions of the cable at once; tbf lets its bucket through unhindered.
    assert 0.8 * 50e6 / 8 < cost["bytes_per_s"] < 1.4 * 50e6 / 8
    assert cost["link_s"] < 1.1 * cost["step_s"]
