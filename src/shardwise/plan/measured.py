"""What CPU ranks of a machine reach side by side, as `shardwise doctor --save` measured it.

A rate holds for the number of ranks that ran then: more of them share the same cores and memory.
Times are tables by amount, so caches, first touches and what a call costs are in them.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.plan.links import read_off
from shardwise.plan.operators import Operator, Operators

Table = Mapping[float, float]


@dataclass(frozen=True, slots=True)
class Rates:
    """Of one rank.

    Attributes:
        ranks: that ran side by side, each with `threads` threads.
        call_s: seconds of an operator that moves nothing.
        operators: seconds by operations or bytes, for each kind and dtype of `plan.operators`, and
            "adamw" by bytes of parameters.
        collectives: seconds by bytes that a rank takes in, for each transport and kind.
    """

    ranks: int
    threads: int
    call_s: float
    operators: Mapping[tuple[str, str], Table]
    collectives: Mapping[tuple[str, str], Table]

    def operator_s(self, kind: str, amount: float, dtype: str = "float32") -> float:
        table = self.operators.get((kind, dtype)) or self.operators[kind, "float32"]
        return read_off(table, amount)

    def seconds(self, each: Operator) -> float:
        """Of one call."""
        if each.kind == "view":
            return self.call_s
        found = self.operator_s(each.kind, each.amount, each.dtype)
        if each.kind == "product" and each.moved:  # thin ones wait for memory
            found = max(found, self.operator_s("elementwise", each.moved, each.dtype))
        return found

    def all_seconds(self, work: Operators) -> float:
        return sum(count * self.seconds(each) for each, count in work.items())

    def collective_s(self, transport: str, kind: str, received_bytes: float) -> float:
        if not received_bytes:
            return 0.0
        return read_off(self.collectives[transport, kind], received_bytes)

    def knows(self, transport: str, kinds: set[str]) -> bool:
        return all((transport, kind) in self.collectives for kind in kinds)


KINDS = ("product", "attention", "attention backward", "elementwise", "adamw")


def read_rates(path: Path) -> Rates | None:
    """Of a hardware file; None where it has none (written before there were any, or of GPUs).

    Raises:
        ValueError: a table is broken or incomplete.
    """
    found = tomllib.loads(path.read_text())
    compute = found.get("compute")
    if compute is None:
        return None
    try:
        operators: dict[tuple[str, str], dict[float, float]] = {}
        for row in found["operator"]:
            table = operators.setdefault((row["kind"], row["dtype"]), {})
            table[_above_zero(row["amount"])] = _above_zero(row["seconds"])
        collectives: dict[tuple[str, str], dict[float, float]] = {}
        for row in found["collective"]:
            share = (row["ranks"] - 1) / row["ranks"] * (1 + (row["kind"] == "all_reduce"))
            table = collectives.setdefault((row["transport"], row["kind"]), {})
            table[_above_zero(share * row["bytes"])] = _above_zero(row["seconds"])
        rates = Rates(
            int(_above_zero(compute["ranks"])), int(_above_zero(compute["threads"])),
            _above_zero(compute["call"]), operators, collectives,
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        what = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(
            f"{path}: its measured times cannot be read: {what}; write it anew by: "
            "shardwise doctor --save hardware.toml"
        ) from None
    lacking = [kind for kind in KINDS if (kind, "float32") not in operators]
    if lacking:
        raise ValueError(
            f"{path}: has no [[operator]] of kind {lacking[0]}; write it anew by: "
            "shardwise doctor --save hardware.toml"
        )
    return rates


def _above_zero(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ValueError(f"expected a number above 0, found {value!r}")
    return float(value)
