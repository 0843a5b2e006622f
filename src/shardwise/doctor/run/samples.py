"""Ranks that read the same samples."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.doctor.finding import WRONG, Finding
from shardwise.doctor.run.case import Case

_MOST = 0.5  # of the steps


def check_samples(case: Case) -> Iterator[Finding]:
    tensor = case.config.mesh.tensor  # ranks of one group read the same
    rows = [row["batch"][::tensor] for row in case.by_rank if all(row.get("batch", [0]))]
    if case.num_ranks < 2 or len(rows) < 2:
        return
    same: dict[int, int] = {}
    for sums in rows:
        for rank, value in enumerate(sums):
            if value in sums[:rank]:
                same[rank] = same.get(rank, 0) + 1
    ranks = sorted(rank for rank, count in same.items() if count > _MOST * len(rows))
    if not ranks:
        return
    count = max(same.values())
    named = ", ".join(str(tensor * rank) for rank in ranks)
    several = "s" if len(ranks) > 1 else ""
    yield Finding(
        WRONG,
        "same-samples",
        "ranks read the same samples",
        f"ranks.jsonl: rank{several} {named} began with the same bytes as a "
        f"rank before in {count} of {len(rows)} steps",
        f"{case.num_ranks} ranks learn from fewer samples than a step counts: the data ignores the "
        "index that it is asked for, or draws from a generator that all ranks seed alike",
        f"data.source = {case.config.data.source!r}   # let __getitem__(index) return sample "
        "`index`: the job gives each rank indices of its own",
    )
