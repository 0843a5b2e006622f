"""How long collectives take: from measured times where there are some, else from bandwidths.

    inside a host    (W - 1) / W of the bytes over each device's link
    between hosts    the same bytes over all ports of a host at once, as rings over every port do

A table of times is that of one number of ranks: another number moves (W - 1) / W of the bytes too,
and is read off by what a rank takes in.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Links:
    """`inside`, `outside`: bytes a second that a rank takes in, among the devices of a host and of
    all `per_host` together from other hosts, over what each of them has. `table`: seconds by bytes
    taken in, inside a host.
    """

    inside: float
    outside: float
    per_host: int
    latency: float = 15e-6
    latency_outside: float = 20e-6
    table: Mapping[float, float] = field(default_factory=dict)

    def seconds(self, received_bytes: float, ranks: int, *, crosses: bool) -> float:
        """Of one collective of `ranks` ranks, of which each takes in so much."""
        if ranks < 2 or not received_bytes:
            return 0.0
        within = self._inside(received_bytes)
        if not crosses:
            return within
        hosts = max(1, ranks // self.per_host)
        together = self.outside * min(self.per_host, ranks)
        across = received_bytes / together + self.latency_outside * math.log2(2 * hosts)
        return max(within, across)

    def by_own_port(self, received_bytes: float) -> float:
        """Among ranks with the same number on their hosts, each over a port of its own."""
        return self.latency_outside + received_bytes / self.outside

    def _inside(self, received_bytes: float) -> float:
        if not self.table:
            return self.latency + received_bytes / self.inside
        return read_off(self.table, received_bytes)


def read_off(table: Mapping[float, float], amount: float) -> float:
    """Seconds for an amount, from measured ones: between two by powers, below the least as long as
    that, above the most in proportion.
    """
    known = sorted(table.items())
    (low, low_s), (high, high_s) = known[0], known[-1]
    if amount <= low:  # latency
        return low_s
    if amount >= high:
        return high_s * amount / high
    for (a, a_s), (b, b_s) in itertools.pairwise(known):
        if amount <= b:
            share = math.log(amount / a) / math.log(b / a)
            return math.exp(math.log(a_s) + share * math.log(b_s / a_s))
    raise AssertionError("between the ends")


# torchtitan's profile of all-gathers and reduce-scatters of 2 to 128 MiB on 8 x H100, by what a
# rank takes in: 7/8 of what is gathered.
H100_TIMES: dict[float, float] = {
    7 / 8 * mib * 2**20: us * 1e-6 for mib, us in ((2, 20.2), (8, 43.4), (32, 118.9), (128, 385.3))
}
