"""What the launcher does when ranks fail: which one was the cause, whether and on how many ranks to
start again.

    how a rank ended            means                               lost
    killed by a signal          it, its memory or its host is gone  yes
    hung past the wait limit    the launcher has to kill it         yes
    exit 1 (an exception)       may come again or not               no
    exit 3, SIGTERM             another one failed                  no
    exit 2, exit 4              a mistake, a loss that is no        the job ends: it would come
                                number                              again
    exit 75 (`--requeue`)       asked to stop, saved, steps left    the scheduler starts it again

Every restart is a start like any other, on all ranks that are left: from the newest checkpoint or
copy in memory (`memory`) that is whole. Steps since then are done again. No torch here.
"""

from __future__ import annotations

import signal
from collections.abc import Container, Mapping
from dataclasses import dataclass

from shardwise.errors import ConfigError
from shardwise.train.config import Config
from shardwise.train.config_checks import world_problems
from shardwise.train.config_file import LoadedConfig
from shardwise.units import counted

EXIT_ERROR, EXIT_USER, EXIT_OTHER_RANK, EXIT_FINAL = 1, 2, 3, 4
EXIT_REQUEUE = 75  # EX_TEMPFAIL of sysexits.h: not now, try again
_ENDED_BY_AGENT = -signal.SIGTERM


@dataclass(frozen=True, slots=True)
class Restarts:
    """`--max-restarts` and `--min-ranks`; without the latter a restart needs as many ranks as
    before."""

    most: int = 0
    min_ranks: int | None = None

    def check(self, config: Config, num_ranks: int) -> None:
        """ConfigError for what cannot be meant, before anything is started."""
        if self.min_ranks is None:
            return
        if not self.most:
            raise ConfigError("--min-ranks: has no effect without --max-restarts; add it")
        if self.min_ranks > num_ranks:
            raise ConfigError(
                f"--min-ranks: {self.min_ranks} is above the {counted(num_ranks, 'rank')} of this "
                "job"
            )
        if self.min_ranks < num_ranks and config.run.reproducible == "same_world":
            raise ConfigError(
                "--min-ranks: run.reproducible = same_world needs the same ranks after a restart; "
                "use any_world, or leave --min-ranks out"
            )

    def next_ranks(self, loaded: LoadedConfig, num_ranks: int, num_lost: int) -> int:
        """How many ranks go on: those that are left where the configuration runs on that many, else
        the nearest fewer that are allowed, else more."""
        if self.min_ranks is None or not num_lost:
            return num_ranks
        left = max(self.min_ranks, num_ranks - num_lost)
        choices = [*range(left, self.min_ranks - 1, -1), *range(left + 1, num_ranks + 1)]
        batch = loaded.on(num_ranks).config.train.global_batch

        def can_go_on(num: int) -> bool:
            config = loaded.on(num).config
            return config.train.global_batch == batch and not world_problems(config, num)

        return next(num for num in choices if num == num_ranks or can_go_on(num))


@dataclass(frozen=True, slots=True)
class Failure:
    """How a group of ranks ended: the rank that was the cause, and how many are lost."""

    rank: int
    code: int
    num_lost: int
    is_final: bool

    @classmethod
    def of(cls, codes: Mapping[int, int], killed: Container[int] = ()) -> Failure:
        """From the exit codes of the ranks that failed, the first to end first, and those of them
        that the launcher had to kill: hung ones where nobody else is the cause, else slow ones."""
        consequences = (EXIT_OTHER_RANK, _ENDED_BY_AGENT)
        causes = {rank: code for rank, code in codes.items() if code not in consequences}
        causes = {rank: code for rank, code in causes.items() if rank not in killed} or causes
        rank, code = next(iter((causes or codes).items()))
        return cls(
            rank,
            code,
            num_lost=sum(c < 0 for c in causes.values()),
            is_final=any(c in (EXIT_USER, EXIT_FINAL) for c in codes.values()),
        )

    def __str__(self) -> str:
        if self.code < 0:
            how = f"killed by {signal.Signals(-self.code).name}"
        else:
            how = f"exit code {self.code}"
        return f"rank {self.rank} failed ({how})"
