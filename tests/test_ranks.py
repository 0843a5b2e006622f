"""The pool of ranks: what passes, what is reported when it does not, and that nothing stays."""

import os
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import ranks
from ranks import RankError, announce, on_ranks, run_ranks, spawn_ranks


@on_ranks(1, 2, 3)
def test_reduces_over_the_default_group(rank, world):
    x = torch.tensor([float(rank)])
    dist.all_reduce(x)
    assert x.item() == sum(range(world))
    assert (dist.get_rank(), dist.get_world_size()) == (rank, world)
    assert torch.get_num_threads() == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(2)
def test_parameters_and_fixtures_reach_the_body(rank, dtype, tmp_path):
    assert torch.ones(1, dtype=dtype).dtype is dtype
    (tmp_path / str(rank)).write_text(str(os.getpid()))
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == 2


@on_ranks(2)
@pytest.mark.parametrize("value", [3])
def test_marks_below_the_decorator_count_too(value, world):
    assert (value, world) == (3, 2)


class TestInAClass:
    """A body may be a method; it runs on a fresh instance."""

    @on_ranks(2)
    def test_method(self, rank):
        assert isinstance(self, TestInAClass)


def who(rank, world, greeting="hello"):
    print("noise")
    return greeting, rank, world, os.getpid(), torch.rand(1)


def test_results_come_in_rank_order_from_processes_that_are_kept():
    first, second = run_ranks(2, who), run_ranks(2, who, greeting="again")
    assert [r[:3] for r in first] == [("hello", 0, 2), ("hello", 1, 2)]
    assert [r[0] for r in second] == ["again", "again"]
    assert [r[3] for r in first] == [r[3] for r in second]
    # Every job starts from the same seed.
    assert {r[4].item() for r in [*first, *second]} == {first[0][4].item()}


def fail_on_last(rank, world):
    if rank == world - 1:
        raise ValueError("wrong on purpose")


def make_group(rank, world):
    return dist.get_world_size(dist.new_group([0, 1]))


def test_ranks_are_replaced_after_a_failure_and_when_groups_gather():
    before = [r[3] for r in run_ranks(2, who)]
    with pytest.raises(RankError, match=r"(?s)rank 1 of 2 failed.*ValueError: wrong on purpose"):
        run_ranks(2, fail_on_last)
    after = [r[3] for r in run_ranks(2, who)]
    assert not set(before) & set(after)
    for _ in range(ranks.rank_worker.MAX_GROUPS):
        run_ranks(2, make_group)
    assert not set(after) & {r[3] for r in run_ranks(2, who)}


def test_next_jobs_are_cheap():
    run_ranks(2, who)
    started_s = time.monotonic()
    for _ in range(10):
        run_ranks(2, who)
    # 2 ms each on a quiet machine; the bound only excludes that processes are started or collected.
    assert time.monotonic() - started_s < 1.0


def test_unusable_calls_are_refused_in_the_parent():
    with pytest.raises(ValueError, match="cannot send the function"):
        run_ranks(2, lambda rank, world: None)
    with pytest.raises(
        ValueError, match=r"cannot send argument 2 \(builtin_function|cannot send argument 2"
    ):
        run_ranks(2, who, lambda: None)
    with pytest.raises(ValueError, match="one or more world sizes"):
        on_ranks()
    with pytest.raises(RankError, match="cannot be pickled"):
        run_ranks(2, give_a_lambda)


def give_a_lambda(rank, world):
    return lambda: None


def save_then_wait(rank, world):
    announce("saved")
    time.sleep(0 if rank == 0 else 1000)
    return "done"


def test_spawned_ranks_can_be_ended_at_a_known_moment():
    with spawn_ranks(2, save_then_wait) as group:
        group.wait_for("saved", rank=1)
        early = group.join(timeout_s=0.2)
        assert [o.kind for o in early] == ["ok", "running"]
        assert "save_then_wait" in early[1].text
        group.kill(1)
        outcomes = group.join(timeout_s=20)
        pids = group.pids
    assert [o.kind for o in outcomes] == ["ok", "died"]
    assert (outcomes[0].value, outcomes[1].text) == ("done", "killed by SIGKILL")
    assert all_gone(pids)


def make_own_group(rank, world):
    assert not dist.is_initialized()
    dist.init_process_group("gloo")
    x = torch.ones(1)
    dist.all_reduce(x)
    return x.item()


def test_spawned_ranks_may_make_their_own_group_as_under_torchrun():
    with spawn_ranks(2, make_own_group, backend=None) as group:
        assert [o.value for o in group.join()] == [2.0, 2.0]


# A time limit of the inner run that is far above what it needs, for a machine under load.
INNER_LIMIT_S = 90


def pytest_in(folder: Path, *options: str) -> list[str]:
    """The command that runs a copy of ranks_gone_wrong.py under the settings of this project."""
    here = Path(__file__).parent
    shutil.copy(here / "ranks_gone_wrong.py", folder / "test_gone_wrong.py")
    shutil.copy(here / "conftest.py", folder / "conftest.py")
    config = [
        "-c",
        str(here.parent / "pyproject.toml"),
        "--rootdir",
        str(folder),
        "-p",
        "no:cacheprovider",
    ]
    return [sys.executable, "-m", "pytest", *config, *options, str(folder / "test_gone_wrong.py")]


@pytest.fixture(scope="module")
def gone_wrong(tmp_path_factory):
    """Outcome and message of every test of ranks_gone_wrong.py."""
    folder = tmp_path_factory.mktemp("gone_wrong")
    report = folder / "report.xml"
    done = subprocess.run(
        pytest_in(folder, f"--junitxml={report}", "-o", "junit_logging=all"),
        capture_output=True,
        text=True,
        timeout=INNER_LIMIT_S,
        check=False,
    )
    assert report.exists(), done.stdout + done.stderr
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = case.get("name", "").removeprefix("test_").removesuffix("[2ranks]")
        kind = next(
            (kind for kind in ("failure", "error", "skipped") if case.find(kind) is not None),
            "passed",
        )
        text = "".join(case.itertext()) + "".join(e.get("message", "") for e in case)
        found[name] = (kind, text)
    return found


@pytest.mark.parametrize(
    ("name", "kind", "parts"),
    [
        ("passes_before", "passed", ["[rank 0] hello from 0", "[rank 1] hello from 1"]),
        # The assertion explains itself, and what the rank printed is shown.
        (
            "assert_on_one_rank",
            "failure",
            ["rank 1 of 2 failed", "assert 41 == 40", "said before the failure"],
        ),
        (
            "first_cause",
            "failure",
            ["(the first cause)", "ValueError: the origin", "RuntimeError: a consequence"],
        ),
        (
            "peer_waits_for_the_failed_rank",
            "failure",
            ["left alone", "rank 1 of 2 is still running", "barrier"],
        ),
        (
            "hang",
            "failure",
            ["limit of 1 s", "in wait_for_ever", "rank 0 of 2 is still running", "rank 1 of 2: ok"],
        ),
        ("exit_code", "failure", ["rank 1 of 2 died", "exit code 7", "rank 0 of 2: ok"]),
        ("killed", "failure", ["rank 0 of 2 died", "killed by SIGKILL"]),
        ("crash", "failure", ["killed by SIGSEGV", "Segmentation fault", "in test_crash"]),
        ("sys_exit", "failure", ["SystemExit: gave up"]),
        ("skips", "skipped", ["no such device"]),
        ("unpicklable", "failure", ["cannot send capsys (CaptureFixture)"]),
        ("destroys_the_group", "passed", []),
        ("leaves_a_mess", "passed", []),
        ("passes_after", "passed", []),
    ],
)
def test_report(gone_wrong, name, kind, parts):
    found_kind, text = gone_wrong[name]
    assert found_kind == kind, text
    for part in parts:
        assert part in text


def test_first_cause_comes_first(gone_wrong):
    _, text = gone_wrong["first_cause"]
    assert text.index("the origin") < text.index("a consequence")


def all_gone(pids, within_s=10.0):
    deadline = time.monotonic() + within_s
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def processes_with(variable: str) -> list[int]:
    """Ids of all processes that carry this NAME=VALUE in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environ = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if variable.encode() in environ:
                found.append(int(entry.name))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_no_process_survives_pytest(tmp_path, end):
    """Ended while a rank hangs: the fork server and the ranks go too."""
    mark = f"SHARDWISE_TEST_MARK={tmp_path}"
    # TMPDIR: pytest ended by force leaves its ranks' log folder; let it lie in this test's own.
    environ = dict(os.environ, SHARDWISE_TEST_MARK=str(tmp_path), TMPDIR=str(tmp_path))
    command = pytest_in(tmp_path, "-k", "hang", "-o", "timeout=0")
    source = tmp_path / "test_gone_wrong.py"
    source.write_text(source.read_text().replace("timeout_s=1)", "timeout_s=1000)"))
    with open(tmp_path / "log", "wb") as log:
        process = subprocess.Popen(command, env=environ, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + INNER_LIMIT_S
        # pytest, the resource tracker, the fork server and two ranks
        while len(pids := processes_with(mark)) < 5 and time.monotonic() < deadline:
            assert process.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.05)
        assert len(pids) == 5
        process.send_signal(end)
        process.wait(20)
        assert all_gone(pids)
    finally:
        process.kill()
        process.wait()
