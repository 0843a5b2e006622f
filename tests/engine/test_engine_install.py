"""`install()` and `uninstall()`: whose names a process sees, and torch's own checks of types."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from engine_kit import Mlp, Plain, batch, line, loss_of, make, same_grads, same_weights

import shardwise as sw
from ranks import on_ranks
from shardwise.install import NAMES, PLACES, is_installed, main

OLD_IMPORT = """
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard as shard_it
fully_shard = "a name of my own"
"""


@pytest.fixture
def user_module(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A module that has imported torch's names."""
    yield import_user("a_user_of_fsdp2")
    sys.modules.pop("a_user_of_fsdp2", None)


def import_user(name: str) -> Any:
    module = sys.modules[name] = types.ModuleType(name)
    exec(OLD_IMPORT, vars(module))
    return module


def torch_names() -> dict[str, Any]:
    """What torch offers now, by place and name."""
    for place in PLACES:
        __import__(place)
    return {
        f"{place}.{name}": getattr(sys.modules[place], name)
        for place in PLACES
        for name in (*NAMES, "FSDPModule")
        if hasattr(sys.modules[place], name)
    }


def test_names_change_and_change_back(user_module: Any) -> None:
    before, mine = torch_names(), dict(vars(user_module))
    with sw.install():
        for key, value in torch_names().items():
            name = key.rpartition(".")[2]
            if hasattr(sw, name) and name != "FSDPModule":
                assert value is getattr(sw, name), key
            else:
                assert value is before[key], key
        assert user_module.shard_it is sw.fully_shard
        assert user_module.MixedPrecisionPolicy is sw.MixedPrecisionPolicy
        assert user_module.fully_shard == "a name of my own"
    assert torch_names() == before
    assert dict(vars(user_module)) == mine


def test_nested_and_repeated(user_module: Any) -> None:
    import torch.distributed.fsdp as fsdp

    original = fsdp.fully_shard
    sw.uninstall()  # nothing to undo
    with sw.install():
        with sw.install():
            late = import_user("a_late_user")
        assert fsdp.fully_shard is sw.fully_shard  # the inner one leaves it to the outer
        user_module.shard_it = original  # as if imported in an odd way
        sw.install()
        assert user_module.shard_it is sw.fully_shard
    assert fsdp.fully_shard is original and user_module.shard_it is original
    assert late.shard_it is sw.fully_shard  # from where it has it, nobody knows
    del sys.modules["a_late_user"]


def test_parts_of_torch_that_come_late_get_torchs_names_back() -> None:
    """Pipelining copies the names at import."""
    import torch.distributed.fsdp as fsdp

    late = types.ModuleType("torch.a_late_part")
    with sw.install():
        sys.modules["torch.a_late_part"] = late
        exec(OLD_IMPORT, vars(late))
        assert late.shard_it is sw.fully_shard  # type: ignore[attr-defined]
    assert late.shard_it is fsdp.fully_shard is not sw.fully_shard  # type: ignore[attr-defined]
    del sys.modules["torch.a_late_part"]


def test_the_module_can_be_called() -> None:
    """`import shardwise.install` puts the module where the function was."""
    code = (
        "import shardwise.install, shardwise, torch.distributed.fsdp as fsdp\n"
        "with shardwise.install(): assert fsdp.fully_shard is shardwise.fully_shard\n"
        "assert fsdp.fully_shard is not shardwise.fully_shard\n"
        "from shardwise.install import install, uninstall\n"
        "install(); shardwise.uninstall()\n"
        "assert fsdp.fully_shard is not shardwise.fully_shard\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


@on_ranks(1)
def test_isinstance() -> None:
    """Modules that were sharded before, in between and by torch; whoever holds the class."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    early, theirs = sw.fully_shard(nn.Linear(2, 2)), fully_shard(nn.Linear(2, 2))
    bases = type(early).__mro__
    assert not isinstance(early, FSDPModule)
    with sw.install():
        late = sw.fully_shard(nn.Conv1d(2, 2, 1))
        for module in (early, late):
            assert isinstance(module, FSDPModule) and isinstance(module, sw.FSDPModule)
            assert issubclass(type(module), FSDPModule)
        assert isinstance(theirs, FSDPModule) and not isinstance(theirs, sw.FSDPModule)
        assert not isinstance(nn.Linear(2, 2), FSDPModule)
        assert type(late).__mro__[1] is sw.FSDPModule and type(late).__mro__[-2] is FSDPModule
        late.float().zero_grad()  # ours and nn.Module's, not torch's methods
        assert type(nn.Sequential(late)[:1]) is nn.Sequential
    assert not isinstance(early, FSDPModule) and not isinstance(late, FSDPModule)
    assert isinstance(theirs, FSDPModule) and type(early).__mro__ == bases


@on_ranks(2)
def test_training_through_torchs_names(world: int) -> None:
    from torch.distributed import fsdp

    model, oracle = make(Mlp), Plain(make(Mlp), world)
    with sw.install():
        policy = fsdp.MixedPrecisionPolicy(reduce_dtype=torch.float32)
        for layer in model.layers:
            fsdp.fully_shard(layer, mesh=line(world), mp_policy=policy)
        fsdp.fully_shard(model, mesh=line(world), mp_policy=policy)
        fsdp.share_comm_ctx([model])
        fsdp.register_fsdp_forward_method(model, "forward")
        oracle.step(0)
        loss_of(model(batch(model, 0, dist.get_rank()))).backward()
        same_grads(model, oracle.grads())
        assert isinstance(model, fsdp.FSDPModule)
        assert isinstance(model.unshard(async_op=True), fsdp.UnshardHandle)
        model.reshard()


@on_ranks(2)
def test_torchs_objects_are_taken(world: int) -> None:
    """Policies that were made before, and the state dict functions of torch's checkpointing."""
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        set_model_state_dict,
    )
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

    policy, offload = MixedPrecisionPolicy(param_dtype=torch.bfloat16), OffloadPolicy()
    model, plain = make(Mlp), make(Mlp)
    with sw.install():
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=line(world), mp_policy=policy, offload_policy=offload)
        assert model(batch(model, 0, 0)).dtype == torch.bfloat16
        options = StateDictOptions(full_state_dict=True)
        whole = get_model_state_dict(model, options=options)
        for name, value in plain.state_dict().items():
            assert torch.equal(whole[name], value), name
        doubled = {n: 2 * t for n, t in whole.items()}
        set_model_state_dict(model, dict(doubled), options=options)
        same_weights(model, doubled)


@pytest.mark.parametrize("installed", [False, True], ids=["plain", "installed"])
@on_ranks(2)
def test_replicate_leaves_sharded_modules_alone(installed: bool, world: int) -> None:
    """torch's `replicate` (DDP) around a model of which a part is sharded."""
    from torch.distributed._composable import replicate

    model, oracle = make(Mlp), Plain(make(Mlp), world)
    if installed:
        sw.install()
    sw.fully_shard(model.layers[1], mesh=line(world))
    replicate(model)
    with pytest.raises(RuntimeError, match="already managed by `fully_shard`"):
        replicate(model.layers[1])
    oracle.step(0)
    loss_of(model(batch(model, 0, dist.get_rank()))).backward()
    sw.uninstall()
    same_grads(model, oracle.grads(), exact=False)


@on_ranks(1)
def test_torchs_fully_shard_refuses_what_is_sharded() -> None:
    from torch.distributed.fsdp import fully_shard

    with pytest.raises(AssertionError, match="fully_shard has already been applied"):
        fully_shard(sw.fully_shard(nn.Linear(2, 2)))


@on_ranks(1)
def test_share_comm_ctx() -> None:
    sw.share_comm_ctx([])
    sw.share_comm_ctx([sw.fully_shard(nn.Linear(2, 2)), sw.fully_shard(nn.Linear(2, 2))])
    with pytest.raises(ValueError, match="found Linear; call fully_shard"):
        sw.share_comm_ctx([nn.Linear(2, 2)])  # type: ignore[list-item]


SCRIPT = """
import sys
import helper_beside
from torch.distributed.fsdp import fully_shard
print(__name__, sys.argv[1:], fully_shard.__module__, helper_beside.shard.__module__)
"""


@pytest.mark.parametrize("as_module", [False, True], ids=["script", "module"])
def test_launcher(tmp_path: Path, as_module: bool) -> None:
    (tmp_path / "the_script.py").write_text(SCRIPT)
    (tmp_path / "helper_beside.py").write_text(
        "from torch.distributed.fsdp import fully_shard as shard"
    )
    program = ["-m", "the_script"] if as_module else [str(tmp_path / "the_script.py")]
    done = subprocess.run(
        [sys.executable, "-m", "shardwise.install", *program, "--lr", "1"],
        cwd=tmp_path if as_module else None,
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    ours = "shardwise.engine.api"
    assert done.stdout.split("\n")[0] == f"__main__ ['--lr', '1'] {ours} {ours}"


SILENT = """
import os
import torch
import torch.distributed as dist
import shardwise
shardwise.install()
dist.init_process_group("gloo", init_method="file://" + os.environ["MEETING"], rank=0, world_size=1)
model = torch.nn.Linear(2, 2)
{}
"""
SHARDS = "from torch.distributed.fsdp import fully_shard; fully_shard(model)"


@pytest.mark.parametrize(
    ("what", "rank", "said"),
    [
        ("model = torch.nn.parallel.DistributedDataParallel(model)", "0", True),
        ("model = torch.nn.parallel.DistributedDataParallel(model)", "1", False),
        (SHARDS, "0", False),
    ],
)
def test_nothing_was_sharded(tmp_path: Path, what: str, rank: str, said: bool) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SILENT.format(what)],
        env={**os.environ, "RANK": rank, "MEETING": str(tmp_path / "meeting")},
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    line = "shardwise.install: nothing was sharded: fully_shard was never called in this process\n"
    assert (done.stderr == line) == said, done.stderr


def test_launcher_without_a_program() -> None:
    with pytest.raises(SystemExit, match=r"^usage: python -m shardwise.install"):
        main([])
    with pytest.raises(SystemExit, match=r"^shardwise.install: nowhere.py: no such file$"):
        main(["nowhere.py", "--lr", "1"])
    assert not is_installed()
