"""The simulator of a step's time: schedules by hand, and what must hold for any."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from beside import from_benchmarks
from shardwise.cli.plan import main as plan_main
from shardwise.plan import speed as speeds
from shardwise.plan.count import plan_count
from shardwise.plan.hardware import DEVICES, LINKS, parse_link
from shardwise.plan.links import H100_TIMES, Links
from shardwise.plan.simulate import UnitTime, simulate
from shardwise.plan.speed import Speed, Work, step_time
from shardwise.train.config import DecoderConfig
from shardwise.train.decoder import Decoder
from shardwise.train.flops import count_flops


def layers(number: int, **times: float) -> list[UnitTime]:
    """With a root that has nothing."""
    values = {"forward": 3.0, "backward": 6.0, **times}
    return [UnitTime(f"layer {i}", **values) for i in range(number)]


def test_alone() -> None:
    """Three units of 3 + 6 seconds, and an optimizer of 2."""
    found = simulate(layers(3), step_s=2.0)
    assert (found.step_s, found.compute_s, found.exposed_s) == (29.0, 29.0, 0.0)


def test_hidden_gathers() -> None:
    """Of 1 second: the first gather is waited for, and the last reduction before the step."""
    units = layers(3, gather=1.0, gather_again=1.0, reduce=2.0)
    found = simulate(units, step_s=1.0)
    # Forward 1 + 9; the backward's first gather is exposed: + 1 + 18; the last reduction: + 2.
    assert found.step_s == pytest.approx(1 + 9 + 1 + 18 + 2 + 1)
    assert found.exposed_s == pytest.approx(1 + 1 + 2)
    forward = [entry for entry in found.timeline if entry[2] in ("gather", "forward")]
    assert forward == [
        ("gather", "layer 0", "gather", 0.0, 1.0),
        ("gather", "layer 1", "gather", 1.0, 2.0),
        ("compute", "layer 0", "forward", 1.0, 4.0),
        ("gather", "layer 2", "gather", 4.0, 5.0),
        ("compute", "layer 1", "forward", 4.0, 7.0),
        ("compute", "layer 2", "forward", 7.0, 10.0),
    ]


def test_gathers_that_take_longer_than_computing() -> None:
    """The gather lane is the bottleneck of the forward: 5, 10, 15 seconds, then the last unit."""
    found = simulate(layers(3, gather=5.0, backward=0.0))
    assert found.step_s == pytest.approx(15 + 3)


def test_without_overlap_everything_adds_up() -> None:
    units = layers(3, gather=1.0, gather_again=1.0, reduce=2.0)
    found = simulate(units, step_s=1.0, overlaps=False)
    assert found.step_s == pytest.approx(3 * (1 + 3 + 1 + 6 + 2) + 1)


def test_micro_batches() -> None:
    """Reduced each time or once; a copy that stays is gathered once."""
    units = layers(2, gather=1.0, reduce=2.0)
    each = simulate(units, micro_batches=3, overlaps=False).step_s
    once = simulate(units, micro_batches=3, overlaps=False, reduces_each=False).step_s
    assert each == pytest.approx(3 * 2 * (1 + 3 + 6 + 2)) and once == pytest.approx(each - 8)
    kept = [UnitTime("a", 3.0, 6.0, gather=1.0, gathers_once=True)]
    assert simulate(kept, micro_batches=3).step_s == pytest.approx(1 + 27)


def test_the_root_is_gathered_first_and_its_backward_is_last() -> None:
    units = [*layers(1), UnitTime("root", 1.0, 1.0, gather=2.0, is_root=True)]
    order = [(entry[1], entry[2]) for entry in simulate(units).timeline]
    assert order[0] == ("root", "gather") and order[-1] == ("root", "backward")


times = st.floats(0.0, 10.0)


@given(st.lists(st.tuples(times, times, times, times, times), min_size=1, max_size=6), times)
def test_bounds(values: list[tuple[float, ...]], less: float) -> None:
    """Never faster than any lane, never slower than all lanes one after another; and a faster link
    never makes a step slower."""
    units = [UnitTime(str(i), *v) for i, v in enumerate(values)]
    found = simulate(units).step_s
    compute, gather = sum(v[0] + v[1] for v in values), sum(v[2] + v[3] for v in values)
    reduce = sum(v[4] for v in values)
    assert max(compute, gather, reduce) - 1e-6 <= found <= compute + gather + reduce + 1e-6
    share = less / 10
    faster = [UnitTime(u.name, u.forward, u.backward, share * u.gather, share * u.gather_again,
                       share * u.reduce) for u in units]  # fmt: skip
    assert simulate(faster).step_s <= found + 1e-6


def test_links() -> None:
    links = Links(100e9, 10e9, 8, latency=0.0, latency_outside=0.0)
    assert links.seconds(1e9, 8, crosses=False) == pytest.approx(0.01)
    assert links.seconds(1e9, 64, crosses=True) == pytest.approx(1 / 80)  # over 8 ports
    assert links.by_own_port(1e9) == pytest.approx(0.1)
    assert links.seconds(1e9, 1, crosses=False) == links.seconds(0, 8, crosses=False) == 0
    measured = Links(1.0, 1.0, 8, table=H100_TIMES)
    for received, seconds in H100_TIMES.items():
        assert measured.seconds(received, 8, crosses=False) == pytest.approx(seconds)
    known = [measured.seconds(2.0**i, 8, crosses=False) for i in range(10, 34)]
    assert known == sorted(known)


def test_the_table_of_devices() -> None:
    for name, device in DEVICES.items():
        assert device.flops("float8") >= device.flops("bfloat16") >= device.flops("float32"), name
        assert min(device.bandwidth, device.link, device.network) > 1e9
    assert parse_link("PCIe4") == LINKS["pcie4"] and parse_link("12.5 GB/s")[0] == 12.5e9
    for text in ("", "fast", "-3", "nan", "0"):
        with pytest.raises(ValueError, match="expected one of"):
            parse_link(text)


def test_slower_links_favour_copies_on_each_host() -> None:
    """64 devices over 10 Gbit/s, all in bfloat16: a host takes in 28 GB of 16 (a sum of gradients
    over 8 hosts) instead of 48 (two gathers and a reduction), and a step waits less. Inside of a
    host none waits.
    """

    def exposed(strategy: str, world: int, replicas: int, network: float) -> float:
        plan = plan_count(
            8_000_000_000, strategy=strategy, world=world, replicas=replicas, dtype=torch.bfloat16
        )
        links = Links(450e9, network, 8)
        speed = Speed(DEVICES["h100"], links)
        work = Work([2.0 * unit.numel * 8192 for unit in plan.units])
        return step_time(plan, work, speed).exposed_s

    assert exposed("hybrid_shard", 8, 8, 1.25e9) < exposed("full_shard", 64, 1, 1.25e9)
    assert exposed("full_shard", 8, 1, 50e9) < 0.05


def test_published_runs() -> None:
    """What is fitted is what the plan uses; what is predicted is within 15%."""
    benchmark = from_benchmarks("plan_published")
    found = benchmark.rows()
    shares = {run.mode: benchmark.fit(run) for run in benchmark.FITTED}
    own = {"eager": speeds.EAGER, "compiled": speeds.COMPILED, "float8, compiled": speeds.FLOAT8}
    assert own == pytest.approx(shares, rel=2e-3)
    predicted = [row for row in found if not row["fitted"]]
    assert len(predicted) == 5 and all(abs(row["residual"]) < 0.15 for row in predicted)


def test_flops_are_those_of_the_products() -> None:
    sizes = DecoderConfig(dim=32, layers=2, heads=2, vocab_size=97)
    with torch.device("meta"):
        model = Decoder(sizes, 64)
    units = [("blocks.0",), ("blocks.1",), ("",)]
    found = count_flops(model, units, 16)
    assert found is not None and found[0] == found[1]
    matrices = sum(p.numel() for p in model.blocks[0].parameters() if p.ndim == 2)
    attention = 2 * 2 * 16 * 16 * 32
    assert found[0] == pytest.approx(2 * 16 * matrices + attention)
    assert found[2] == pytest.approx(2 * 16 * 97 * 32)  # the head


# -- the command ---------------------------------------------------------------------------------
def rows_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert plan_main([*arguments, "--json"]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_plan_has_times_where_the_device_has_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    job = ("--model.dim", "64", "--model.layers", "2")
    for arguments in (("--params", "7e9", "--gpus", "8xh100"), (*job, "--gpus", "2x4090")):
        found = rows_of(capsys, *arguments)
        rows = [r for r in found["rows"] if r["offload"] == "none" and r["wire"] == "exact"]
        assert len(rows) >= 4 and all(row["step_s"] > row["exposed_s"] >= 0 for row in rows)
        assert any("no run of this job has confirmed" in note for note in found["notes"])
    slow = rows_of(capsys, "--params", "7e9", "--gpus", "8xh100", "--link", "10G")["rows"]
    fast = rows_of(capsys, "--params", "7e9", "--gpus", "8xh100", "--link", "nvlink")["rows"]
    times = [(a["step_s"], b["step_s"]) for a, b in zip(slow, fast, strict=True) if a["step_s"]]
    assert len(times) >= 4 and all(a > b for a, b in times)
    unknown = rows_of(capsys, "--params", "7e9", "--gpus", "8x80GB")["rows"]
    assert all(row["step_s"] is None for row in unknown)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--gpus", "8xh100", "--link", "fast"), "--link: 'fast': expected one of pcie3"),
        (("--gpus", "8x80GB", "--link", "pcie4"), "--link: a step's time needs a device by name"),
        (("--gpus", "8xh100", "--tokens", "few"), "--tokens: 'few': expected a number"),
    ],
)
def test_mistakes(
    arguments: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan_main(["--params", "7e9", *arguments]) == 2
    said = capsys.readouterr().err
    assert text in said and said.count("\n") == 1
