"""Device work of a unit beside FSDP2's: kernels launched, bytes copied, collectives, per pass.

    python benchmarks/launches.py [--world 8] [--json FILE]

A dispatch mode watches one step of three units on torch's fake group; what a plain model does in
the same step is taken off, so what is left is the engine's. No device is needed, and none has
confirmed the numbers: an operator counts as one launch where torch 2.13's CUDA kernels take the
fast path (`launches_of` holds the conditions), and else as one for each tensor.

Forward: gather. Backward: gather again, copy-in, scaling. Large parameters are gathered and
reduced where they are, by one group of collectives, which is counted as one collective.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shardwise as sw
from shardwise.bench.machine import describe
from shardwise.comm import streams
from shardwise.comm.c10d import transport
from shardwise.layout import Cuts

NUM_UNITS = 3
# Operators that compute nothing on a device.
QUIET = frozenset(
    (
        *("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "resize_"),
        *("set_", "detach", "record_stream", "lift_fresh", "untyped_storage"),
        *("_record_function_enter_new", "_record_function_exit"),
    )
)


class AsOnDevice(streams.NoStreams):
    """The engine and its layouts believe that there is a device: gathers run ahead."""

    is_async = True


# -- counting --------------------------------------------------------------------------------------
def is_dense(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() or (tensor.ndim == 2 and tensor.t().is_contiguous())


def launches_of(name: str, args: tuple[Any, ...], out: Any) -> int:
    """One for an operator; for one that takes a list, one for each tensor where its kernel does not
    take them all at once: that wants dense tensors, and `_foreach_copy_` equal strides on both
    sides, `chunk_cat` equal dtypes or bfloat16 into float32.
    """
    if name == "_foreach_copy_":
        pairs = list(zip(args[0], args[1], strict=True))
        alike = all(a.stride() == b.stride() and a.shape == b.shape for a, b in pairs)
        return 1 if alike and all(is_dense(t) for pair in pairs for t in pair) else len(pairs)
    if name == "split_with_sizes_copy":
        is_fast = is_dense(args[0]) and all(is_dense(t) and t.dtype == args[0].dtype for t in out)
        return 1 if is_fast else len(out)
    if name in ("chunk_cat", "_chunk_cat"):
        dtypes = {t.dtype for t in args[0]}
        casts = dtypes == {torch.bfloat16} and out.dtype == torch.float32
        is_fast = is_dense(out) and all(map(is_dense, args[0]))
        return 1 if is_fast and (dtypes == {out.dtype} or casts) else len(args[0])
    return 1


@dataclass
class Work:
    """What a pass does on the device."""

    launches: int = 0
    copied_bytes: int = 0
    collectives: int = 0
    kinds: Counter[str] = field(default_factory=Counter)

    def less(self, other: Work) -> Work:
        kinds = Counter(self.kinds)
        kinds.subtract(other.kinds)
        return Work(
            self.launches - other.launches,
            self.copied_bytes - other.copied_bytes,
            self.collectives - other.collectives,
            Counter({kind: num for kind, num in kinds.items() if num}),
        )

    def of_a_unit(self) -> dict[str, Any]:
        return {
            "launches": round(self.launches / NUM_UNITS, 2),
            "copied_bytes": self.copied_bytes // NUM_UNITS,
            "collectives": round(self.collectives / NUM_UNITS, 2),
            "kinds": {kind: num / NUM_UNITS for kind, num in sorted(self.kinds.items())},
        }


class Counting(TorchDispatchMode):
    """Counts into the `Work` of the pass that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.work = Work()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        space, _, name = func._schema.name.partition("::")
        if space == "c10d":
            self.work.collectives += 1
            return out
        views = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        if views or space == "profiler" or name in QUIET:
            return out
        written = self._written(func, args, kwargs, out)
        num = launches_of(name, args, kwargs.get("out", out))
        self.work.launches += num
        self.work.kinds[name] += num
        self.work.copied_bytes += sum(t.nbytes for t in written)
        return out

    @staticmethod
    def _written(
        func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> list[torch.Tensor]:
        found: list[Any] = []
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                found += tree_leaves(args[i] if i < len(args) else kwargs.get(argument.name))
        return [t for t in found or tree_leaves(out) if isinstance(t, torch.Tensor)]


# -- what is counted -------------------------------------------------------------------------------
@dataclass(frozen=True)
class Case:
    """Parameters of a unit, and how they are sharded."""

    num: int
    dtype: str = "fp32"
    rows: str = "even"  # | "uneven"
    size: str = "small"  # | "large", "huge": half of the gradients have 512 KiB, or 8 MiB
    cut: str = "rows"  # | "columns" | "owner"

    @property
    def is_by_rows(self) -> bool:
        return self.cut == "rows"

    @property
    def text(self) -> str:
        return f"{self.num} parameters, {self.dtype}, {self.rows}, {self.size}" + (
            "" if self.is_by_rows else f", cut by {self.cut}"
        )


class Block(nn.Module):
    """Matrices and vectors in turn, each used once."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        dim = 61 if case.rows == "uneven" else 64
        rows, columns = {"small": (1, 1), "large": (8, 4), "huge": (32, 16)}[case.size]
        matrix = (dim * rows, dim * columns)
        shapes = [matrix if i % 2 == 0 else (dim,) for i in range(case.num)]
        self.held = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total: Any = 0
        for param in self.held:
            total = total + (param * 1.5).sum()
        return x * total


class Blocks(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(case) for _ in range(NUM_UNITS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def columns(param: nn.Parameter) -> Any:
    from torch.distributed.tensor import Shard

    return Shard(param.ndim - 1)


class Owner(sw.RowShard):
    """All rows on one rank."""

    def __init__(self, rank: int) -> None:
        super().__init__(0)
        self.rank = rank

    def cuts(self, rows: int, world: int) -> Cuts:
        return Cuts.whole(rows, world, self.rank % world)


def owners() -> Callable[[nn.Parameter], Any]:
    """Matrices are whole on one rank each, in turn."""
    ranks = itertools.count()
    return lambda param: Owner(next(ranks)) if param.ndim == 2 else None


def shard(engine: str, model: nn.Module, mesh: DeviceMesh, case: Case) -> None:
    if engine == "plain":
        return
    package: Any = sw if engine == "shardwise" else fsdp
    options: dict[str, Any] = {"mesh": mesh}
    if engine == "shardwise":
        options["transport"] = "c10d"
    if case.dtype == "bf16":
        options["mp_policy"] = package.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if case.cut == "columns":
        options["shard_placement_fn"] = columns
    elif case.cut == "owner":
        options["shard_placement_fn"] = owners()
    for block in model.blocks:  # type: ignore[union-attr]
        package.fully_shard(block, **options)
    package.fully_shard(model, **options)


def count(engine: str, mesh: DeviceMesh, case: Case) -> dict[str, Work]:
    """Of the third step, forward and backward."""
    torch.manual_seed(0)
    model = Blocks(case)
    dtype = torch.bfloat16 if case.dtype == "bf16" else torch.float32
    if engine == "plain":
        model = model.to(dtype)
    shard(engine, model, mesh, case)
    x = torch.randn(2, 4, dtype=dtype)
    works: dict[str, Work] = {}
    for _ in range(3):
        mode = Counting()
        with mode:
            works["forward"] = mode.work
            loss = model(x).sum()
            works["backward"] = mode.work = Work()
            loss.backward()
        model.zero_grad()
    return works


def compare(mesh: DeviceMesh, case: Case, engines: list[str]) -> dict[str, dict[str, Any]]:
    """What each engine does beside a plain model, for one unit."""
    plain = count("plain", mesh, case)
    return {
        engine: {
            phase: work.less(plain[phase]).of_a_unit()
            for phase, work in count(engine, mesh, case).items()
        }
        for engine in engines
    }


def cases() -> list[Case]:
    by_rows = [
        Case(num, dtype, rows, size)
        for size in ("small", "large", "huge")
        for rows in ("even", "uneven")
        for dtype in ("fp32", "bf16")
        for num in (4, 9, 12)
    ]
    return [*by_rows, Case(9, cut="columns"), Case(9, cut="owner")]


def open_mesh(world: int) -> DeviceMesh:
    """Torch's fake group, with streams as on a device, and a backend that starts collectives as one
    as NCCL does.
    """
    transport.coalesces = lambda group, device: True
    streams.MAKERS["cpu"] = lambda device: AsOnDevice()
    streams.streams_for.cache_clear()
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    return init_device_mesh("cpu", (world,))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--world", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    mesh = open_mesh(options.world)
    rows = []
    print(
        f"{'launches of a unit: shardwise / FSDP2':48} {'forward':>11} {'backward':>11}  KiB copied"
    )
    for case in cases():
        engines = ["shardwise"] if case.cut == "owner" else ["shardwise", "fsdp2"]
        found = compare(mesh, case, engines)
        rows.append({"case": case.text, "by_rows": case.is_by_rows, **found})
        cells = [
            " / ".join(f"{found[e][phase]['launches']:g}" for e in engines)
            for phase in ("forward", "backward")
        ]
        copied = " / ".join(
            f"{sum(p['copied_bytes'] for p in found[e].values()) / 1024:.0f}" for e in engines
        )
        print(f"{case.text:48} {cells[0]:>11} {cells[1]:>11}  {copied}")
    result = {"benchmark": "launches", "world": options.world, "rows": rows, **describe()}
    print(json.dumps(result))
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
