"""Wire formats as users ask for them: on which transport they run, and that frozen weights are not
rounded.

Whoever asks for a format asks for numbers that come with it, so these must not depend on where the
ranks run: "auto" takes process groups then, also where all ranks are of one host, and a transport
that has no formats is refused.
"""

from __future__ import annotations

from shardwise.comm.choose import ANYWHERE
from shardwise.comm.transport import Transport
from shardwise.engine.core.bucket import BucketState
from shardwise.engine.core.unit import Unit
from shardwise.errors import UsageError
from shardwise.layout import Wire


def transport_name(wire: Wire, transport: str | Transport) -> str | Transport:
    """What serves a unit that travels by `wire`, where the user asked for `transport`."""
    return ANYWHERE if transport == "auto" and not wire.is_plain else transport


def check_transport(wire: Wire, transport: Transport) -> None:
    """Raise for one that has no wire formats."""
    if not wire.is_plain and not transport.takes_wires:
        raise ValueError(
            f"wire={wire.text!r}: transport {transport.name!r} moves elements as they are; use "
            f"transport='auto' or {ANYWHERE!r}, or leave the wire out"
        )


def check_no_wire(unit: Unit, method: str) -> None:
    """Raise where the user brings a collective for a unit that has a wire format."""
    wire = unit.plan.wire
    if not wire.is_plain:
        raise UsageError(
            f"{method}: the unit {unit.name!r} travels by wire={wire.text!r}, which encodes what "
            "collectives move; leave out one of the two"
        )


class WireFormats:
    """Listens in contexts with such units: a bucket of which something was frozen since it was laid
    out keeps its bits from its next gather on.
    """

    def gathering(self, unit: Unit) -> None:
        for bucket in unit.buckets:
            if bucket.layout.wire.shard.gather.is_lossy and bucket.bucket is not None:
                bucket.bucket.keeps_bits = has_frozen(bucket)

    def filling(self, unit: Unit) -> None:
        for bucket in unit.buckets:
            home = None if bucket.home is None else bucket.home.bucket
            if home is not None and home.layout.wire.shard.gather.is_lossy:
                home.keeps_bits = has_frozen(bucket)


FORMATS = WireFormats()  # it keeps nothing


def has_frozen(bucket: BucketState) -> bool:
    return not all(param.sharded.requires_grad for param in bucket.params)
