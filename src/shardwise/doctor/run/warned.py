"""What ranks were warned of."""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.doctor.finding import HINT, Finding
from shardwise.doctor.run.case import Case
from shardwise.train.record import WARNINGS
from shardwise.units import counted

_SHOWN = 200  # characters of the first one


def check_warnings(case: Case) -> Iterator[Finding]:
    since = str(case.start.get("at", ""))
    found = []
    for path in sorted((case.path / WARNINGS).glob("rank_*.log")):
        try:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        found += [(path.name, line) for line in lines if line >= since]
    if not found:
        return
    name, first = found[0]
    several = len({name for name, _ in found})
    yield Finding(
        HINT,
        "warned",
        "ranks were warned",
        f"{WARNINGS}/{name}: {first[:_SHOWN]} ({counted(len(found), 'warning')} on "
        f"{counted(several, 'rank')} since the last start)",
        "the run went on; a wait that is told again and again is a rank that is slow or stopped",
        f"cat {case.path / WARNINGS}/*",
    )
