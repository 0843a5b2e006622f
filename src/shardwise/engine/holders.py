"""Where modules hold the parameters of a bucket.

All parameters of a bucket change form together (shards at rest, full while the unit runs), several
times a step. So each module's `_parameters` is written by one `dict.update`, and compared by one
pass in C; what is written is made once and holds until parameters or places change.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import is_
from typing import TYPE_CHECKING, Any

import torch.nn as nn

if TYPE_CHECKING:
    from shardwise.engine.param import ShardedParam


@dataclass(frozen=True, slots=True)
class Holder:
    """One module's `_parameters`, and under which names it holds what, in both forms."""

    parameters: dict[str, Any]
    sharded: dict[str, nn.Parameter]
    full: dict[str, nn.Parameter]

    @property
    def shows_shards(self) -> bool:
        """The usual state between steps."""
        held = map(self.parameters.get, self.sharded)
        return all(map(is_, held, self.sharded.values()))


def holders_of(params: list[ShardedParam]) -> tuple[Holder, ...]:
    """One for each module that holds any of `params`; tied parameters are in several."""
    found: dict[int, Holder] = {}
    for param in params:
        for parameters, name in param.slots:
            holder = found.setdefault(id(parameters), Holder(parameters, {}, {}))
            holder.sharded[name] = param.sharded
            holder.full[name] = param.full
    return tuple(found.values())
