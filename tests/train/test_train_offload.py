"""[offload] of a job: the numbers of one without it, also over a kill, and what is refused."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import results, run_job

from ranks import on_ranks, run_ranks
from shardwise import CPUOffloadPolicy, OffloadPolicy
from shardwise.cli import main
from shardwise.errors import ConfigError, OffloadError
from shardwise.importing.formats import import_file
from shardwise.offload.files import Calls
from shardwise.train.config_file import load_config
from shardwise.train.model import shard

SMALL = {"offload__chunk": "64KiB", "train__steps": 6}


def job(rank: int, world: int, folder: Path, name: str, place: str, **more: Any) -> None:
    more = {**SMALL, **more}
    if place == "nvme":
        more["offload__directory"] = str(folder / "offload")
    if place == "none":
        more = {k: v for k, v in more.items() if not k.startswith("offload__")}
    run_job(folder / name, offload__optimizer=place, **more)


def numbers(folder: Path) -> list[tuple[float, ...]]:
    return [(row[1], row[2]) for row in results(folder)]


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"optim__kind": "rmsprop", "optim__state_dtype": "bfloat16", "optim__momentum": 0.9},
        {"run__reproducible": "any_world", "optim__kind": "adagrad"},
        {"offload__in_background": True, "checkpoint__every": 2, "train__eval_every": 3},
    ],
    ids=["adamw", "bfloat16 state", "any_world", "in background"],
)
def test_the_same_numbers(more: dict[str, Any], tmp_path: Path) -> None:
    places = ("none", "cpu", "nvme") if not more else ("none", "nvme")
    for place in places:
        run_ranks(2, job, tmp_path, place, place, **more)
    expected = numbers(tmp_path / "none")
    assert len(expected) == 6
    for place in places[1:]:
        assert numbers(tmp_path / place) == expected
    assert not list((tmp_path / "offload").iterdir())


def test_it_goes_on_from_a_checkpoint_with_the_state_elsewhere(tmp_path: Path) -> None:
    """On another number of ranks too; the working files of the job before are gone."""
    run_ranks(2, job, tmp_path, "whole", "none", checkpoint__every=2)
    for place, world in (("nvme", 2), ("none", 2), ("nvme", 1), ("cpu", 2)):
        left = {} if place == "cpu" else {"stop_after": 2}
        run_ranks(world, job, tmp_path, "parts", place, checkpoint__every=2, **left)
    found, expected = numbers(tmp_path / "parts"), numbers(tmp_path / "whole")
    assert found[:4] == expected[:4]  # then one rank: another order of sums
    assert found == [pytest.approx(pair, rel=1e-5) for pair in expected]


class Broken(Calls):
    num_writes = 0

    def pwrite(self, descriptor: int, memory: memoryview, offset: int) -> int:
        Broken.num_writes += 1
        if Broken.num_writes == 12:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().pwrite(descriptor, memory, offset)


@on_ranks(1)
def test_a_full_disk_ends_the_job_and_the_next_goes_on(
    rank: int, world: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job(rank, world, tmp_path, "whole", "none", checkpoint__every=1)
    with monkeypatch.context() as patch:
        patch.setattr("shardwise.offload.optimizer.Calls", Broken)
        patch.setattr("shardwise.offload.files.Calls", Broken)
        with pytest.raises(OffloadError, match="No space left on device; free some space there"):
            job(rank, world, tmp_path, "parts", "nvme", checkpoint__every=1)
    assert Broken.num_writes >= 12
    job(rank, world, tmp_path, "parts", "nvme", checkpoint__every=1)
    assert numbers(tmp_path / "parts") == numbers(tmp_path / "whole")


@on_ranks(2)
def test_a_directory_that_cannot_be_is_found_before_the_start(
    rank: int, world: int, tmp_path: Path
) -> None:
    (tmp_path / "offload").write_text("")
    with pytest.raises(
        ConfigError, match=r"offload\.directory: .*rank_0000.\.state: cannot be made"
    ):
        job(rank, world, tmp_path, "run", "nvme")
    assert not (tmp_path / "run" / "config.toml").exists()


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"optimizer": "disk"}, "optimizer"),
        ({"optimizer": "nvme"}, "offload.directory: is empty; .* needs a directory on a local"),
        ({"optimizer": "cpu", "directory": "x"}, "offload.directory: has no effect: offload.opt"),
        ({"step_on": "cpu"}, "offload.step_on: has no effect: offload.optimizer is 'none'"),
        ({"chunk": "1MiB"}, "offload.chunk: has no effect"),
        ({"in_background": "true"}, "offload.in_background: has no effect"),
        ({"optimizer": "cpu", "chunk": "3 apples"}, "offload.chunk: '3 apples' is no size of 64"),
        (
            {"optimizer": "cpu", "chunk": "1KiB"},
            "offload.chunk: '1KiB' is no size of 64KiB or more",
        ),
    ],
)
def test_refused(values: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load_config(None, [(f"offload.{key}", value) for key, value in values.items()])


def test_refused_beside_others() -> None:
    nvme = [("offload.optimizer", "nvme"), ("offload.directory", "x")]
    with pytest.raises(ConfigError, match=r"checkpoint\.background: would copy the optimizer's"):
        load_config(None, [*nvme, ("checkpoint.background", "true")])
    with pytest.raises(ConfigError, match=r"sgd keeps no state \(optim\.momentum is 0\)"):
        load_config(None, [*nvme, ("optim.kind", "sgd")])


@pytest.mark.parametrize(("ratio", "outcome"), [("0.5", "unsupported"), ("1.0", "not needed")])
def test_a_part_of_the_state_is_refused(ratio: str, outcome: str, tmp_path: Path, capsys) -> None:
    """DeepSpeed's `ratio`: a part of the steps runs on the host."""
    below = f'"offload_optimizer": {{"device": "cpu", "ratio": {ratio}}}'
    (tmp_path / "zero.json").write_text(f'{{"zero_optimization": {{"stage": 3, {below}}}}}')
    assert main(["import-config", str(tmp_path / "zero.json"), "--json"]) == 0
    rows = {row["key"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert rows["zero_optimization.offload_optimizer.ratio"]["outcome"] == outcome


def test_a_file_in_the_place_of_a_coordinators_directory(tmp_path: Path, capsys) -> None:
    (tmp_path / "file").write_text("")
    assert main(["replicas", "--dir", str(tmp_path / "file")]) == 2
    assert "cannot be a directory: File exists" in capsys.readouterr().err


@pytest.mark.parametrize("file", ["ds_zero3_nvme.json"])
def test_imported(file: str) -> None:
    path = Path(__file__).parent.parent / "importing" / "configs" / file
    found = {k: s.value for k, s in import_file(path, 16).settings.items() if k[:3] == "off"}
    assert found == {
        "offload.optimizer": "nvme",
        "offload.directory": "/scratch/swap",
        "offload.step_on": "cpu",
    }


ZERO_3 = '{"zero_optimization": {"stage": 3, "offload_param": {"device": "%s"}}}'
ACCELERATE = """
distributed_type: FSDP
fsdp_config: {fsdp_version: 2, fsdp_offload_params: %s, fsdp_reshard_after_forward: true}
"""


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("zero.json", ZERO_3 % "cpu", "cpu"),
        ("zero.json", ZERO_3 % "nvme", None),
        ("accelerate.yaml", ACCELERATE % "true", "cpu"),
        ("accelerate.yaml", ACCELERATE % "false", None),
    ],
)
def test_parameters_on_the_host(name: str, text: str, found: str | None, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    settings = import_file(tmp_path / name, 16).settings
    taken = settings.get("offload.parameters")
    assert (None if taken is None else taken.value) == found


def test_a_job_hands_the_policy_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it does takes an accelerator: tests/simulated_device, and `gpu`."""
    given: list[Any] = []
    monkeypatch.setattr(
        "shardwise.train.model.shard_model", lambda *_, **options: given.append(options)
    )
    monkeypatch.setattr("shardwise.train.model.init_device_mesh", lambda *_, **__: None)
    for value, kind in (("none", OffloadPolicy), ("cpu", CPUOffloadPolicy)):
        config = load_config(None, [("offload.parameters", value)]).config
        shard(torch.nn.Linear(2, 2), config, torch.device("cpu"), 1)
        assert type(given.pop()["offload_policy"]) is kind
