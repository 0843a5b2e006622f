"""Where the time of a run went. Times in which another process had the core are taken out first:
a busy machine is no fault of the run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import fmean, median
from typing import Any

from shardwise.doctor.finding import COSTS, Finding
from shardwise.doctor.run.case import Case
from shardwise.train.config import resolved_strategy
from shardwise.train.link import slow_text
from shardwise.units import counted

_DATA, _WAITING, _QUEUE = 0.2, 0.4, 0.25  # shares of a step that are worth a word
_SAVES, _SAVE_AIM = 0.2, 0.02
_SLOWER = 1.6  # times the fastest of the second quarter
_BEHIND = 1.3  # times the median of the other ranks
_OFTEN = 0.8  # of the steps
_COMPILED_AGAIN = 2  # steps
_FEWEST = 4
_FEWEST_QUARTERS = 16


def check_time(case: Case) -> Iterator[Finding]:
    rows = case.by_rank
    is_slow = bool(slow := list(_link(case)))
    yield from slow
    if len(rows) >= _FEWEST:
        late = list(_straggler(case, rows))
        yield from late
        if not late:
            yield from _data(case, rows)
            yield from [] if is_slow else _waiting(case, rows)
        yield from _cores(case, rows)
    yield from _slower(case)
    yield from _recompiles(case)
    yield from _saves(case)


def _share(rows: list[dict[str, Any]], key: str) -> float:
    """Of a step, on the mean rank, other processes left out."""
    return sum(fmean(row[key]) for row in rows) / sum(_step_s(row) for row in rows)


def _step_s(row: dict[str, Any]) -> float:
    return max(1e-9, row["step_time_s"] - fmean(row["queue_s"]))


def _spent(row: dict[str, Any]) -> list[float]:
    """Of each rank until its backward was over."""
    parts = zip(row["busy_s"], row["waiting_s"], row["data_s"], strict=True)
    return [sum(each) for each in parts]


def _straggler(case: Case, rows: list[dict[str, Any]]) -> Iterator[Finding]:
    """A rank that the others wait for: by its data, or by its own work."""
    if case.num_ranks < 2:
        return
    for key, what in (("data_s", "reading samples"), ("busy_s", "its own work")):
        own = [row[key] for row in rows]
        if key == "busy_s" and case.start.get("device") != "cpu":
            return  # a device's time is not seen by its host
        slowest = [max(range(case.num_ranks), key=each.__getitem__) for each in own]
        rank = max(set(slowest), key=slowest.count)
        if slowest.count(rank) < _OFTEN * len(rows):
            continue
        mine = median(each[rank] for each in own)
        others = median(median(v for r, v in enumerate(each) if r != rank) for each in own)
        step_s = median(map(_step_s, rows))
        if mine < _BEHIND * others or mine - others < 0.2 * step_s:
            continue
        lines = (
            "run.threads = 1   # the same on all ranks; see whether another program has its core"
        )
        if key == "data_s":
            lines = f"data.source = {case.config.data.source!r}   # on rank {rank}: a slow disk?"
        yield Finding(
            COSTS,
            "straggler",
            f"rank {rank} is behind the others",
            f"ranks.jsonl: {what} takes {mine:.3g} s of a step there, {others:.3g} s on the others "
            f"(medians of {len(rows)} steps; a step takes {step_s:.3g} s)",
            "all ranks wait for the slowest one in every step",
            lines,
        )
        return


def _data(case: Case, rows: list[dict[str, Any]]) -> Iterator[Finding]:
    share = _share(rows, "data_s")
    if share < _DATA:
        return
    source = case.config.data.source
    yield Finding(
        COSTS,
        "data-starved",
        "ranks wait for their samples",
        f"ranks.jsonl: reading samples takes {share:.0%} of a step (mean of "
        f"{counted(len(rows), 'step')})",
        "the model stands still meanwhile: samples are made or read while they are asked for",
        f"data.source = {source!r}   # make them once before (a file of tokens, .npy, is mapped)",
    )


def _waiting(case: Case, rows: list[dict[str, Any]]) -> Iterator[Finding]:
    if case.num_ranks < 2 or case.start.get("device") != "cpu":
        return
    share = _share(rows, "waiting_s")
    if share < _WAITING:
        return
    config = case.config
    train, strategy = config.train, resolved_strategy(config)
    share_of_rank = train.global_batch // case.num_ranks
    lines = []
    if train.micro_batch < share_of_rank:
        bigger = next(n for n in range(train.micro_batch + 1, share_of_rank + 1)
                      if share_of_rank % n == 0)  # fmt: skip
        lines.append(f"train.micro_batch = {bigger}   # fewer gathers and reductions for a step")
    if strategy == "full_shard":
        lines.append('shard.strategy = "shard_grad_op"   # gathers once a step; more memory')
    if config.shard.transport == "c10d":
        lines.append('shard.transport = "auto"   # shared memory, where ranks are on one host')
    lines.append(f"train.global_batch = {2 * train.global_batch}   # more work for each step")
    yield Finding(
        COSTS,
        "communication",
        "ranks wait for each other",
        f"ranks.jsonl: the main thread did not run in {share:.0%} of a step (mean of "
        f"{counted(len(rows), 'step')}, all {case.num_ranks} ranks alike; no samples, no other "
        "process)",
        f"that is communication: {strategy} with {train.micro_batch} samples a micro-batch has too "
        "little to compute for what it moves",
        "\n".join(lines),
    )


def _link(case: Case) -> Iterator[Finding]:
    """Gathers between hosts, by what the run itself measured."""
    cost, strategy = case.link, resolved_strategy(case.config)
    if not cost or (text := slow_text(cost, strategy)) is None:
        return
    lines = ""
    if cost["hybrid_bytes"] < cost["link_bytes"]:
        lines = (
            f'shard.strategy = "hybrid_shard"\nmesh.replicate = {cost["hosts"]}   # a copy of the '
            "model for each host: more memory"
        )
    share = case.config.train.global_batch // max(1, case.num_ranks)
    if case.config.train.micro_batch < share:
        lines += f"\ntrain.micro_batch = {share}   # fewer gathers for a step"
    if case.config.shard.reduce_wire == "exact":
        lines += (
            '\nshard.reduce_wire = "bf16"   # half of the bytes, rounded (docs/communication.md)'
        )
    yield Finding(
        COSTS,
        "slow-link",
        "the link between hosts is slow for what goes through it",
        f"log.jsonl: {text}",
        f"under {strategy} each unit is gathered between hosts, and all ranks wait for that",
        lines.strip() or "train.global_batch = ...   # more work for each step",
    )


def _cores(case: Case, rows: list[dict[str, Any]]) -> Iterator[Finding]:
    threads, cores = case.start.get("threads", 0), case.start.get("cores", 0)
    if case.start.get("device") != "cpu" or not cores or case.num_ranks * threads <= cores:
        return
    share = fmean(fmean(row["queue_s"]) / row["step_time_s"] for row in rows)
    if share < _QUEUE:
        return
    yield Finding(
        COSTS,
        "too-many-threads",
        "ranks wait for a core",
        f"log.jsonl: {case.num_ranks} ranks with {counted(threads, 'thread')} each on "
        f"{counted(cores, 'core')}; ranks.jsonl: {share:.0%} of a step another thread had the core",
        "more threads than cores take turns, and each collective waits for the last one",
        f"run.threads = {max(1, cores // case.num_ranks)}",
    )


def _slower(case: Case) -> Iterator[Finding]:
    if case.start.get("device") == "cpu":  # without what other processes took
        times = [(row["step"], max(_spent(row))) for row in case.by_rank]
    else:
        times = [(row["step"], row["step_time_s"]) for row in case.steady]
    if len(times) < _FEWEST_QUARTERS:
        return
    quarter = len(times) // 4
    name = "ranks.jsonl" if case.start.get("device") == "cpu" else "metrics.jsonl"
    # The fastest of each: what grows moves it too, and what else the machine did does not.
    before, between, after = (
        min(time for _, time in times[start : start + quarter])
        for start in (quarter, 2 * quarter, len(times) - quarter)
    )
    if before <= 0 or after < _SLOWER * before or not before < between < after:
        return
    data = {row["step"]: max(row["data_s"]) for row in case.by_rank}
    late = [data[step] for step, _ in times[-quarter:] if step in data]
    of_data = f", {median(late):.3g} s of it reading samples" if late else ""
    yield Finding(
        COSTS,
        "slower",
        "steps take longer and longer",
        f"{name}: {before:.3g} s at step {times[quarter][0]}, {after:.3g} s at step "
        f"{times[-1][0]}{of_data} (the fastest of {quarter} steps)",
        "something grows with the steps: a list that is kept, a file that is read from its start, "
        "a device that gets hot",
        f"log.profile_steps = [{times[quarter][0]}, {times[-1][0]}]   # then compare both traces",
    )


def _recompiles(case: Case) -> Iterator[Finding]:
    """Behind the first steps; an evaluation needs graphs of its own, once."""
    rows = [row for row in case.events("compiled") if row["step"] > case.first_steady]
    if len(rows) < _COMPILED_AGAIN:
        return
    yield Finding(
        COSTS,
        "recompiles",
        "units are compiled again and again",
        f"log.jsonl: new graphs in {counted(len(rows), 'step')} behind the first ones, "
        f"{rows[-1].get('graphs')} in all; such a step took "
        f"{median(row['seconds'] for row in rows):.3g} s",
        "torch.compile makes a graph for each size or number that it finds: samples of unequal "
        "length, a count in an attribute of the model; behind some of them it gives up, in silence",
        "shard.compile = false   # or give all batches one shape; TORCH_LOGS=recompiles says why",
    )


def _saves(case: Case) -> Iterator[Finding]:
    """Those on the way; the last one has to be."""
    for event, key, title in (
        ("saved", "checkpoint.every", "checkpoints take much of the time"),
        ("evaluated", "train.eval_every", "evaluations take much of the time"),
    ):
        rows = [row for row in case.events(event) if row["step"] < case.config.train.steps]
        section, _, name = key.partition(".")
        every = getattr(getattr(case.config, section), name)
        step_s = fmean([row["step_time_s"] for row in case.steady] or [0.0])
        if len(rows) < _FEWEST or not every or not step_s:
            continue
        save_s = median(row["seconds"] for row in rows)
        share = save_s / (save_s + every * step_s)
        if share < _SAVES:
            continue
        aim = math.ceil(save_s / (_SAVE_AIM * step_s))
        lines = f"{key} = {-(-aim // 10) * 10}   # 2% of the time"
        if event == "saved" and not case.config.checkpoint.background:
            lines += "\ncheckpoint.background = true   # in a thread, while training goes on"
        yield Finding(
            COSTS,
            "saves-too-often" if event == "saved" else "evaluates-too-often",
            title,
            f"log.jsonl: each takes {save_s:.3g} s, and the {counted(every, 'step')} between two "
            f"take {every * step_s:.3g} s: {share:.0%} of the time",
            "training stands still meanwhile",
            lines,
        )
