"""Memory that did not fall: what the plan counts by kind, beside what ranks had at most.

On CPU a rank's figure is its resident set, in which pages that ranks share count in each; what a
process had before the model was built is taken off.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from shardwise.doctor.finding import COSTS, HINT, Finding
from shardwise.doctor.run.case import Case, Predicted
from shardwise.layout import strategy_named
from shardwise.train.config import CustomModelConfig, DecoderConfig, resolved_strategy
from shardwise.units import text_of_bytes

_MUCH = 2**29  # bytes below which nobody looks for memory
_LEAK = 2**26
_OUTWEIGHS = 4  # times all that could be sharded
_MORE_GATHERED = 1.5  # times what units by themselves would gather
_ROOT = 0.8  # of all parameters
_ROOM = 0.5


def check_memory(case: Case) -> Iterator[Finding]:
    yield from _grows(case)
    yield from _units(case)
    yield from _buffers(case)
    if (predicted := case.predicted) is not None:
        yield from _activations(case, predicted)


def by_kind(case: Case) -> dict[str, int]:
    """Bytes of a rank, predicted; empty where they are not known."""
    if (predicted := case.predicted) is None:
        return {}
    needs = predicted.needs
    return {
        "parameters": needs.weights,
        "gradients": needs.gradients,
        "optimizer": needs.optimizer,
        "gathered": needs.gathered,
        "activations": needs.activations,
        "logits": needs.logits,
        "predicted": needs.total,
    }


def _weight(case: Case) -> int:
    room = case.start.get("room_bytes", 0)
    return COSTS if room and case.growth_bytes > _ROOM * room else HINT


def _grows(case: Case) -> Iterator[Finding]:
    """From block of steps to block of steps, long after everything has its buffers."""
    peaks = [(row["step"], row["peak_memory_bytes"]) for row in case.steady
             if "peak_memory_bytes" in row]  # fmt: skip
    if len(peaks) < 8:
        return
    marks = [peaks[round(i * (len(peaks) - 1) / 5)] for i in range(1, 6)]
    rises = [after - before for (_, before), (_, after) in pairwise(marks)]
    total = sum(rises)
    earlier = marks[0][1] - case.start.get("base_bytes", 0)
    if total < max(_LEAK, earlier // 4) or min(rises) < total // 10:
        return
    steps = marks[-1][0] - marks[0][0]
    yield Finding(
        COSTS,
        "memory-grows",
        "memory grows with every step",
        f"metrics.jsonl: {text_of_bytes(marks[0][1])} at step {marks[0][0]}, "
        f"{text_of_bytes(marks[-1][1])} at step {marks[-1][0]}: {text_of_bytes(total / steps)} a "
        "step, without an end",
        "something of each step is kept: losses or outputs in a list with their graphs (keep "
        "loss.item(), or loss.detach()), a cache of samples",
        f"log.profile_steps = [{marks[-1][0]}]   # the trace shows memory by operator",
    )


def _units(case: Case) -> Iterator[Finding]:
    """What is gathered together is much more than it needs to be."""
    config = case.config
    if case.num_ranks < 2 or strategy_named(resolved_strategy(config)).lifetime != "use":
        return
    units = case.start.get("units", [])
    if not units or (config.shard.unit == "auto" and not config.shard.overrides):
        return
    sizes = [unit["gathered_bytes"] for unit in units]
    largest = max(units, key=lambda unit: unit["gathered_bytes"])
    share = largest["gathered_bytes"] / max(1, sum(sizes))
    predicted = case.predicted
    if predicted is not None:
        now, auto = predicted.plan.gathered_bytes, predicted.auto_plan.gathered_bytes
        if now < _MORE_GATHERED * auto:
            return
        instead = f"; units by themselves would gather {text_of_bytes(auto)}"
    elif share < _ROOT or not isinstance(config.model, CustomModelConfig):
        return
    else:
        instead = ""
    yield Finding(
        COSTS,
        "units",
        "most of the model is gathered at once",
        f"log.jsonl: {largest['name']} holds {share:.0%} of all parameters, "
        f"{text_of_bytes(largest['gathered_bytes'])} that are whole on every rank while it runs"
        f"{instead}; config.toml: shard.unit = {config.shard.unit!r}",
        "what no unit takes is left to the root, which stays gathered through forward and "
        "backward: memory cannot fall below that",
        'shard.unit = "auto"   # `shardwise explain` shows the units before a run',
    )


def _buffers(case: Case) -> Iterator[Finding]:
    buffers = case.start.get("buffer_bytes", 0)
    params = sum(unit["gathered_bytes"] for unit in case.start.get("units", []))
    if buffers < max(_LEAK, params):
        return
    yield Finding(
        _weight(case) if buffers < _MUCH else COSTS,
        "buffers",
        "buffers outweigh the parameters",
        f"log.jsonl: buffers have {text_of_bytes(buffers)} on each rank, parameters "
        f"{text_of_bytes(params)} over all ranks",
        "only parameters are sharded; buffers (tables, masks, caches) are whole on every rank",
        "# in the model: compute the table where it is used, or keep the part that is used",
    )


def _activations(case: Case, predicted: Predicted) -> Iterator[Finding]:
    needs, config = predicted.needs, case.config
    kinds = {"activations": needs.activations, "logits": needs.logits}
    name, size = max(kinds.items(), key=lambda item: item[1])
    both = sum(kinds.values())
    if both < max(_MUCH, _OUTWEIGHS * predicted.unsharded_bytes):
        return
    if case.growth_bytes < both // 2:  # the run did not need it
        return
    train, shard, lines = config.train, config.shard, list[str]()
    if name == "activations" and shard.activation_checkpointing != "full":
        lines.append('shard.activation_checkpointing = "full"   # the same numbers, more time')
    if name == "logits" and not isinstance(config.model, DecoderConfig):
        lines.append('train.chunked_loss = "on"')
    if train.micro_batch > 1:
        lines.append(f"train.micro_batch = {train.micro_batch // 2}   # the same numbers")
    if not lines:
        return
    yield Finding(
        _weight(case),
        name,
        f"memory is {name}, which sharding leaves alone",
        f"plan: {name} {text_of_bytes(size)} of {text_of_bytes(needs.total)} on a rank; the whole "
        f"model with gradients and optimizer state is {text_of_bytes(predicted.unsharded_bytes)}; "
        f"measured: {text_of_bytes(case.growth_bytes)} above what a rank began with",
        f"more ranks or another strategy change little: {name} grow with the micro-batch and are "
        "each rank's own",
        "\n".join(lines),
    )
