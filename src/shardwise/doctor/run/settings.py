"""Settings that had no effect on this run, though each is sound by itself."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.doctor.finding import COSTS, HINT, Finding
from shardwise.doctor.run.case import Case
from shardwise.train.config import gather_limit


def check_settings(case: Case) -> Iterator[Finding]:
    config, start = case.config, case.start
    train, optim, shard = config.train, config.optim, config.shard
    if optim.warmup_steps >= train.steps:
        highest = max((row.get("lr", 0.0) for row in case.rows), default=0.0)
        yield Finding(
            COSTS,
            "warm-up-never-ends",
            "the learning rate never got where it was to be",
            f"config.toml: optim.warmup_steps = {optim.warmup_steps}, train.steps = {train.steps}; "
            f"metrics.jsonl: the highest lr is {highest:.3g}, optim.lr is {optim.lr:g}",
            "the warm-up is as long as the run: optim.schedule and what follows it had no effect",
            f"optim.warmup_steps = {train.steps // 20}",
        )
    alone = case.num_ranks == 1
    if alone and shard.strategy not in ("auto", "no_shard"):
        yield _idle(
            f"shard.strategy = {shard.strategy!r}",
            "the run had one rank",
            "there is nobody to share with: all strategies are the same",
            f"shardwise train {case.path / 'config.toml'} --nproc 2",
        )
    if gather_limit(config) and start.get("device") == "cpu":
        yield _idle(
            f"shard.gather_limit = {shard.gather_limit!r}",
            "the run was on CPU",
            "nothing is gathered ahead there",
            "shard.gather_limit = 0",
        )


def _idle(setting: str, why: str, meaning: str, remedy: str) -> Finding:
    name = setting.partition(" =")[0]
    return Finding(
        HINT,
        f"no-effect-{name.partition('.')[2].replace('_', '-')}",
        f"{name} had no effect",
        f"config.toml: {setting}; log.jsonl: {why}",
        meaning,
        remedy,
    )
