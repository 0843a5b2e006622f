"""What becomes of measurements: rows, verdicts, exit codes, JSON, table, figure, limits."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bench_kit import FakeGroups, broken
from rich.console import Console

from shardwise.bench import command, compare
from shardwise.bench.compare import Plan
from shardwise.bench.engines import KINDS, Kind, parse_engines
from shardwise.bench.figure import draw
from shardwise.bench.group import Deadline, TimeIsUp
from shardwise.bench.rows import Comparison
from shardwise.bench.table import show
from shardwise.bench.workload import workload_named
from shardwise.errors import ConfigError

ROW_KEYS = {
    "state", "valid", "step_s", "step_quartiles_s", "cpu_s_per_rank", "waiting_s", "exposed_s",
    "num_timed_steps", "round_medians_s", "tokens_per_s", "step_to_floor", "step_to_fsdp2",
    "excess_to_fsdp2", "memory_to_fsdp2", "traffic_per_step_and_rank", "peak_memory_bytes",
    "peak_memory_parts_bytes", "loss", "losses_after_steps", "error",
}  # fmt: skip


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> FakeGroups:
    fake = FakeGroups()
    monkeypatch.setattr(compare, "RankGroup", fake)
    return fake


def plan_of(engines: str, **settings: Any) -> Plan:
    workload = workload_named("tiny")
    return Plan(workload, "fp32", tuple(parse_engines(engines)), num_rounds=2, **settings)


def run(plan: Plan, limit_s: float = 0.0) -> Comparison:
    return compare.compare(plan, Console(file=io.StringIO()), Deadline(limit_s))


def test_ratios_and_json(groups):
    groups.behaviour = {
        "shardwise": {"step_s": 0.15}, "fsdp2": {"step_s": 0.3}, "floor": {"loss": 7.0}
    }  # fmt: skip
    result = run(plan_of("shardwise,fsdp2,floor"))
    assert result.is_sound
    found = result.as_json()
    assert found["num_params"] == 1000
    assert found["tokens_per_rank"] == 64
    row = found["engines"]["shardwise"]
    assert set(row) == ROW_KEYS
    assert row["step_to_floor"] == pytest.approx(1.5)
    assert row["excess_to_fsdp2"] == pytest.approx(0.25)
    assert row["exposed_s"] == pytest.approx(0.05)
    assert row["tokens_per_s"] == pytest.approx(2 * 64 / 0.15, rel=1e-3)
    assert row["num_timed_steps"] == 10
    assert [n for n, _ in row["losses_after_steps"]] == [7, 12]
    assert found["engines"]["floor"]["valid"], "the floor trains another model and says so"
    json.dumps(found)
    assert not groups.alive


def test_another_loss_is_invalid(groups):
    groups.behaviour = {"shardwise": {"loss": 2.01}}
    result = run(plan_of("shardwise,fsdp2,ddp,floor"))
    states = {row.engine.name: result.state(row) for row in result.rows}
    assert states == {"shardwise": "INVALID", "fsdp2": "ok", "ddp": "ok", "floor": "ok"}
    assert not result.is_sound
    out = io.StringIO()
    show(Console(file=out, width=180), result)
    assert "INVALID" in out.getvalue()


@pytest.mark.parametrize("when", ["start_error", "run_error"])
def test_an_engine_that_fails_is_a_row(groups, when):
    groups.behaviour = {"fsdp2": {when: broken()}}
    result = run(plan_of("shardwise,fsdp2,ddp"))
    assert [result.state(row) for row in result.rows] == ["ok", "failed", "ok"]
    row = result.as_json()["engines"]["fsdp2"]
    assert row == {"state": "failed", "valid": False, "error": "RuntimeError: no such thing"}
    assert not result.is_sound
    assert not groups.alive


def test_others_may_refuse_or_be_missing(groups, monkeypatch):
    here = Kind("a", (), "json", "a")
    monkeypatch.setitem(KINDS, "fairscale", here)
    monkeypatch.setitem(KINDS, "megatron_fsdp", replace(here, package="nowhere_at_all"))
    groups.behaviour = {"fairscale": {"start_error": broken("KeyError: 'all_gather'")}}
    result = run(plan_of("shardwise,fairscale,megatron_fsdp"))
    assert [result.state(row) for row in result.rows] == ["ok", "refused", "not installed"]
    assert result.is_sound
    assert "megatron_fsdp" not in groups.started
    out = io.StringIO()
    show(Console(file=out, width=180), result)
    assert "fairscale: KeyError: 'all_gather'" in out.getvalue()
    assert "megatron_fsdp: not installed: pip install a" in out.getvalue()


def test_nothing_that_ran_is_no_success(groups):
    groups.behaviour = {"shardwise": {"start_error": TimeIsUp("late")}}
    result = run(plan_of("shardwise"))
    assert result.state(result.rows[0]) == "no time"
    assert not result.is_sound


def test_a_turn_after_the_limit_is_not_begun(groups, monkeypatch):
    result = run(plan_of("shardwise"), limit_s=1e-9)
    assert groups.started == []
    assert result.rows[0].error == "the time limit was reached before its turn"


def test_the_floor_is_measured_first_and_all_groups_end(groups):
    groups.behaviour = {"fsdp2": {"start_error": TimeIsUp("late")}}
    result = run(plan_of("shardwise,fsdp2,floor", with_memory=False))
    assert groups.started[0] == "floor"
    assert [result.state(row) for row in result.rows] == ["ok", "no time", "ok"]

    class Running(Deadline):
        """Time for the first turn only."""

        @property
        def left_s(self):
            return 0.0 if groups.started else 1.0

    groups.started.clear()
    result = compare.compare(
        plan_of("shardwise,ddp,floor"), Console(file=io.StringIO()), Running(0.0)
    )
    assert [result.state(row) for row in result.rows] == ["no time", "no time", "ok"]
    assert not groups.alive


@pytest.mark.parametrize("width", [80, 120, 180])
def test_a_table_is_never_cut(groups, width):
    result = run(plan_of("shardwise:shard_grad_op:c10d,fsdp2,floor"))
    out = io.StringIO()
    show(Console(file=out, width=width), result)
    text = out.getvalue()
    assert all(len(line) <= width for line in text.splitlines())
    for word in ("shardwise:shard_grad_op:c10d", "middle half", "moved MiB", "/ FSDP2", "2.0000"):
        assert word in text
    assert "…" not in text


def test_memory_alone_takes_no_times_but_a_loss(groups):
    groups.behaviour = {"ddp": {"loss": 2.1}}
    result = run(replace(plan_of("shardwise,fsdp2,ddp"), num_rounds=0))
    assert groups.started == ["shardwise", "fsdp2", "ddp"] and not groups.alive
    assert [result.state(row) for row in result.rows] == ["ok", "ok", "INVALID"]
    row = result.as_json()["engines"]["shardwise"]
    assert row["losses_after_steps"] == [[compare.NUM_MEMORY_STEPS, 2.0]]
    assert row["memory_to_fsdp2"] > 0 and row["peak_memory_bytes"] > 0
    assert row["traffic_per_step_and_rank"]["num_gathers"] == 2
    assert not {"step_s", "step_to_floor", "excess_to_fsdp2"} & set(row)
    out = io.StringIO()
    show(Console(file=out, width=180), result)
    assert "nan" not in out.getvalue()


@pytest.mark.parametrize("options", ["--no-memory", "--figure x.png"])
def test_memory_alone_excludes_what_it_leaves_out(options, capsys):
    assert command.main(["--only", "memory", *options.split()]) == 2
    assert "leave out --no-memory and --figure" in capsys.readouterr().err


def test_fresh_processes_are_ended_after_each_turn(groups):
    result = run(plan_of("shardwise,fsdp2", processes="fresh"))
    assert result.is_sound
    assert groups.started == ["shardwise", "fsdp2"] * 2 + ["shardwise", "fsdp2"]  # memory last
    assert [n for n, _ in result.rows[0].losses] == [7, 7]


def test_no_round_is_begun_without_time_for_it(groups, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])

    class Slow(FakeGroups):
        def __call__(self, job, deadline=None):
            now[0] += 40.0
            return super().__call__(job, deadline)

    monkeypatch.setattr(compare, "RankGroup", Slow())
    result = run(plan_of("shardwise", processes="fresh", with_memory=False), limit_s=60.0)
    assert len(result.rows[0].rounds) == 1
    assert result.is_sound


def test_memory_of_a_cgroup(groups, tmp_path, monkeypatch):
    """A folder stands for the cgroup file system: what is made, read and removed."""
    seen = []

    def start(job, deadline=None):
        if job.cgroup:
            seen.append(job.cgroup)
            Path(job.cgroup, "memory.max_usage_in_bytes").write_text("1048576\n")
        return groups(job, deadline)

    monkeypatch.setattr(compare, "RankGroup", start)
    result = run(plan_of("shardwise", cgroup=str(tmp_path)))
    assert result.rows[0].memory is not None
    assert result.rows[0].memory.total == 2**20
    assert len(seen) == 1
    assert Path(seen[0]).parent == tmp_path
    with pytest.raises(ConfigError, match="--cgroup: cannot make a group in"):
        run(plan_of("shardwise", cgroup=str(tmp_path / "absent")))


def test_exit_code_files_and_the_last_line(groups, tmp_path, capsys):
    groups.behaviour = {"shardwise": {"loss": 3.0}}
    target, figure = tmp_path / "result.json", tmp_path / "result.png"
    plan = plan_of("shardwise,fsdp2,floor")
    assert command.run_plans([plan], 0.0, str(target), str(figure)) == 1
    found = json.loads(target.read_text())
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == found
    assert found["schema"] == 2
    assert found["comparisons"][0]["engines"]["shardwise"]["state"] == "INVALID"
    assert figure.read_bytes().startswith(b"\x89PNG")
    groups.behaviour = {}
    assert command.run_plans([plan], 0.0, None, None) == 0


def test_a_figure_of_nothing_is_not_drawn(groups, tmp_path: Path):
    groups.behaviour = {"shardwise": {"start_error": broken()}}
    draw([run(plan_of("shardwise")).as_json()], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


@pytest.mark.parametrize("with_memory", [False, True])
def test_what_was_not_measured_is_not_drawn(groups, tmp_path, monkeypatch, with_memory):
    from matplotlib import pyplot as plt

    shown = []
    monkeypatch.setattr(plt, "close", shown.append)
    result = run(plan_of("shardwise,fsdp2,floor", with_memory=with_memory)).as_json()
    for row in result["engines"].values():
        row["step_quartiles_s"] = [row["step_s"], 2 * row["step_s"]]
    if with_memory:
        result["engines"]["fsdp2"]["peak_memory_bytes"] = None
    draw([result], tmp_path / "x.png")
    times, *memory = shown[0].axes
    assert (
        len(memory) == with_memory and [len(axis.patches) for axis in memory] == [2] * with_memory
    )
    for number, row in zip(times.texts, reversed(result["engines"].values()), strict=True):
        assert number.xy[0] >= row["step_quartiles_s"][1] * 1e3  # behind the error bar


def test_a_figure_without_matplotlib_is_refused_at_once(monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert command.main(["--figure", "x.png"]) == 2
    assert "--figure: needs matplotlib; pip install matplotlib" in capsys.readouterr().err
