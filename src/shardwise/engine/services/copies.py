"""Copies of sharded modules, and reading a sharded model whole within a byte budget.

A copy (EMA, reference model) is sharded like its source: units of its own, shards of its own, no
communication when it is made, nor when it is updated from its source element by element.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from shardwise.engine.core.build import Found
from shardwise.engine.core.context import Context
from shardwise.engine.core.parameter import ShardedParam
from shardwise.engine.core.state import units_in
from shardwise.engine.core.unit import Unit


def copy_unit(unit: Unit, memo: dict[int, Any]) -> Unit | None:
    """The unit of a copied module; None while other modules of its list are not copied yet.

    `memo` is that of `copy.deepcopy`: it knows the copies of the `_parameters` dicts that the
    source's slots point into.
    """
    known = memo.get(id(unit))
    if known is not None:
        return known
    if any(id(param.slots[0][0]) not in memo for param in unit.params):
        return None
    new = Unit(
        unit.name,
        [_found_in_copy(param, memo) for param in unit.params],
        unit.plan,
        unit.streams,
        unit.num_modules,
        frozenset(id(memo[i]) for i in unit.ignored if i in memo),
    )
    new.take_settings(unit.settings)
    new.set_prefetch(unit.prefetch, unit.gather_limit)
    Context().take_in([new])
    memo[id(unit)] = new
    for owner in unit._tied_to:
        new.borrow_from(copy_unit(owner, memo) or owner)
    return new


def _found_in_copy(param: ShardedParam, memo: dict[int, Any]) -> Found:
    slots = [(memo[id(held)], key) for held, key in param.slots if id(held) in memo]
    return Found.again(param, slots[0][0][slots[0][1]], slots)


def copy_attributes(module: nn.Module, new: nn.Module, without: str, memo: dict[int, Any]) -> None:
    """What `copy.deepcopy` does to an object, except for one attribute."""
    memo[id(module)] = new
    for key, value in module.__dict__.items():
        if key != without:
            new.__dict__[key] = copy.deepcopy(value, memo)


@torch.no_grad()
def full_parameters(model: nn.Module, *, budget: int = 2**30) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter as a full plain tensor, one after the other, for export to another engine.

    A collective: all ranks iterate, in step. Tied parameters come once, under their first name.

    Args:
        model: a sharded model, at rest.
        budget: bytes of full tensors that may exist at a time, beside the one that was handed out.
            Units that fit are gathered at once; of larger ones, a parameter at a time.

    Yields:
        (name, tensor): valid until the next one is asked for; clone what you keep.
    """
    owners = {id(p.sharded): (u, p) for u in units_in(model) for p in u.params}
    open_unit: Unit | None = None
    for name, registered in list(model.named_parameters()):
        unit, param = owners.get(id(registered), (None, None))
        if unit is not open_unit and open_unit is not None:
            open_unit.reshard()
            open_unit = None
        if unit is None or param is None:
            whole = registered.detach()
            yield name, whole.full_tensor() if hasattr(whole, "full_tensor") else whole
            continue
        size = sum(p.layout.numel * p.sharded.element_size() for p in unit.params)
        if size > budget or any(b.is_changed_by_gather for b in unit.buckets):
            yield name, registered.detach().full_tensor()  # type: ignore[attr-defined]
            continue
        if open_unit is None:
            unit.start_user_unshard()
            unit.copy.wait()
            open_unit = unit
        full = param.full.detach()
        yield name, full.full_tensor() if isinstance(full, DTensor) else full
    if open_unit is not None:
        open_unit.reshard()
