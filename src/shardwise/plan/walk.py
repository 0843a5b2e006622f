"""A step as the engine executes it, walked without running it: its events in order, and the bytes
that a rank holds at each of them.

What the model does comes from a `Trace`; what follows is the engine's rules: a unit is gathered
when it is called or its backward is reached, the next one ahead of it where that runs beside
computing; released when its forward is left, or nothing in its backward is left to run; reduced
when its gradients are complete and those of units behind it are on their way. Units and buckets are
the layouts that the engine allocates by. `tests/plan` compares the events with recorded ones, and
the bytes with counted ones.

    buffers    packed gradients and the sums that they go into, staging of gathers, whole gradients
               that wait for the last micro-batch, what rounding lost
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields

from shardwise.comm.c10d.in_place import gather_pays
from shardwise.events import Event
from shardwise.layout import BucketLayout, Moment, ReduceLayout, home_layout, home_reduce
from shardwise.plan import trace as marks
from shardwise.plan.live import Held
from shardwise.plan.model import PlannedModel, PlannedUnit
from shardwise.plan.trace import Mark, Trace


@dataclass(frozen=True, slots=True)
class Point:
    """Bytes of a rank at one time."""

    moment: str
    unit: str
    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    buffers: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in KINDS}

    @property
    def engine(self) -> int:
        """Without what the model itself holds."""
        return self.total - self.activations - self.logits


KINDS = tuple(f.name for f in fields(Point))[2:]


@dataclass(frozen=True, slots=True)
class Way:
    """How a step is taken."""

    micro_batches: int = 1
    runs_ahead: bool = False  # gathers run beside computing, as on accelerators
    gather_limit: int | None = None
    is_ordered: bool = True  # process groups; shared memory waits for nothing before the end
    on_accelerator: bool = False
    frees_gradients: bool = False  # units step in the backward
    keeps_shards_on_host: bool = False  # parameters, gradients and state, beside an accelerator


_USUAL = Way()


@dataclass(slots=True)
class Walk:
    """What came out: see the module docstring."""

    events: list[Event] = field(default_factory=list)
    peak: Point = Point("", "", 0, 0, 0, 0, 0, 0, 0)
    engine_peak: Point = Point("", "", 0, 0, 0, 0, 0, 0, 0)  # of what the engine owns
    most: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    points: list[tuple[int, Point]] = field(default_factory=list)  # behind so many events

    def text(self, *codes: str) -> str:
        return " | ".join(f"{e.code} {e.unit}" for e in self.events if not codes or e.code in codes)


def walk(plan: PlannedModel, trace: Trace, way: Way = _USUAL) -> Walk:
    """One optimizer step whose copies are stale, since the one before has written to the shards."""
    engine = _Engine(plan, way)
    engine.known = [mark.unit for mark in trace.marks if mark.what == marks.CALLED]
    # What is between the second micro-batch and the last one holds no more.
    for number in sorted({0, min(1, way.micro_batches - 1), way.micro_batches - 1}):
        engine.begin(is_last=number == way.micro_batches - 1, is_first=number == 0)
        for mark in trace.marks:
            engine.take(mark)
    engine.optimizer_step(trace.marks[-1].now)
    return engine.walk


def received_bytes(plan: PlannedModel, events: Iterable[Event]) -> int:
    """What a rank takes in by these events, by the least that collectives need."""
    found: dict[tuple[str, str], int] = {}
    for unit in plan.units:
        bucket, layout = unit.layout.buckets[0], unit.layout
        ranks = {"replicate": bucket.replicas, "shard": bucket.world}
        gathers = [c for c in unit.collectives if c.moment is Moment.FORWARD]
        reductions = [c for c in unit.collectives if c.moment is Moment.POST_BACKWARD]
        for code, moved in (("AG", gathers), ("RS", reductions), ("HG", layout.refreshes)):
            sizes = (c.received_bytes(ranks[c.axis]) for c in moved)
            found[code, unit.name] = sum(map(round, sizes))
    return sum(found.get((event.code, event.unit), 0) for event in events)


class _Costs:
    """Bytes of a unit's parts."""

    def __init__(self, unit: PlannedUnit, way: Way) -> None:
        layout = unit.layout
        self.full = layout.full_bytes
        if way.keeps_shards_on_host:
            self.full = sum(b.full_bytes for b in layout.buckets)
        self.grads = layout.grad_bytes
        self.staging = sum(_staging(b, way) for b in layout.buckets if b.world > 1)
        reduces = [r for r in layout.reduces if r.indices]
        self.num_reductions = len(reduces)
        self.packed = sum(_packed(r) * r.dtype.itemsize for r in reduces if r.world > 1)
        self.out = sum(r.chunk_numel * r.dtype.itemsize for r in reduces)
        if unit.strategy.splits_replicas:
            seconds = [home_reduce(home_layout(r.bucket, 0), r) for r in reduces]
            self.out += sum(s.chunk_numel * s.dtype.itemsize for s in seconds)
            self.packed += sum(_packed(s) * s.dtype.itemsize for s in seconds if s.world > 1)
        self.partial = sum(sum(p.numel for p in r.params) * r.dtype.itemsize for r in reduces)
        self.has_frozen = any(not p.spec.requires_grad for b in layout.buckets for p in b.params)


def _staging(bucket: BucketLayout, way: Way) -> int:
    """Of a gather over process groups: parts in the order of ranks, and the cast of the own one."""
    own = bucket.chunk_numel * bucket.gather_dtype.itemsize
    if not way.is_ordered:
        return 0
    if bucket.is_rank_major or (way.on_accelerator and gather_pays(bucket)):
        has_own = way.keeps_shards_on_host or bucket.needs_cast
        return own if way.on_accelerator and has_own else 0
    if bucket.sends_padded:
        return bucket.world * own
    numel = sum(bucket.shard_numel(rank) for rank in range(bucket.world))
    return numel * bucket.gather_dtype.itemsize


def _packed(reduce: ReduceLayout) -> int:
    if reduce.sends_padded:
        return reduce.world * reduce.chunk_numel
    return sum(reduce.data_numel(r) + len(reduce.indices) for r in range(reduce.world))


class _Engine:
    """The state of a rank, and what each mark does to it."""

    def __init__(self, plan: PlannedModel, way: Way) -> None:
        self.walk, self._way, self._units = Walk(), way, plan.units
        self._costs = [_Costs(unit, way) for unit in plan.units]
        layouts = [unit.layout for unit in plan.units]
        to_host = way.keeps_shards_on_host
        kept = 0 if to_host else sum(x.shard_bytes for x in layouts)
        self._parameters = kept + sum(x.middle_bytes for x in layouts)
        self._optimizer = 0 if to_host else sum(unit.state_bytes for unit in plan.units)
        self._feedback = sum(x.feedback_bytes for x in layouts)
        root = len(plan.units) - 1
        self._order = [root, *range(root)]  # of the context
        self._there: set[int] = set()
        self._buffers: dict[tuple[str, int], int] = {}
        self._grads: dict[int, int] = {}
        self.known: list[int] = []  # the order of the forward before

    # -- passes ----------------------------------------------------------------------------------
    def begin(self, *, is_first: bool, is_last: bool) -> None:
        deferred = [u.strategy.defers_reduction for u in self._units]
        self._syncs = [is_last or not d for d in deferred]
        self._stack: list[int] = []
        self._running: Counter[int] = Counter()
        self._calls: list[int] = []
        self._ended: list[int] = []
        self._open: Counter[int] = Counter()
        self._forward_order: dict[int, None] = {}
        self._touched: set[int] = set()
        self._complete: set[int] = set()
        self._issued: set[int] = set()
        self._done_with: list[int] = []
        self._in_flight: list[int] = []
        self._in_backward: int | None = None
        if not is_first:
            return
        for unit in self._order:
            if self._units[unit].strategy.lifetime != "use":
                self._there.discard(unit)
            if self._units[unit].layout.refreshes:
                self._event("HG", unit)

    def take(self, mark: Mark) -> None:
        self._look(mark.most)
        match mark.what:
            case marks.CALLED:
                self._called(mark.unit, mark.now)
            case marks.LEFT:
                self._left(mark.unit)
            case marks.REACHED:
                self._reached(mark.unit, mark.now)
            case marks.FIRST:
                self._begin_gradients(mark.unit)
            case marks.COMPLETE:
                self._completed(mark.unit, mark.now)
            case marks.THROUGH:
                self._through(mark.unit)
            case marks.BACKWARD_OVER:
                self._end_backward(mark.now)

    def optimizer_step(self, now: Held) -> None:
        self._look(now, moment="optimizer step", unit="")

    # -- forward ---------------------------------------------------------------------------------
    def _called(self, unit: int, now: Held) -> None:
        self._event("F", unit)
        self._forward_order.setdefault(unit)
        self._stack.append(unit)
        self._running[unit] += 1
        self._open[unit] += 1
        self._gather(unit, now)
        at = len(self._calls)
        self._calls.append(unit)
        if self._overlaps:
            self._ahead(self.known[at + 1 :], now)

    def _left(self, unit: int) -> None:
        self._stack.pop()
        self._ended.append(unit)
        if self._running[unit] < len(self._units[unit].modules) and self._stack:
            return  # the other modules of a list are still to come
        self._running[unit] = 0
        self._rest(unit)

    # -- backward --------------------------------------------------------------------------------
    def _reached(self, unit: int, now: Held) -> None:
        self._in_backward = unit
        if unit not in self._touched:
            self._touched.add(unit)
            self._event("B", unit)
        done, self._done_with = self._done_with, []
        for each in done:
            if each != unit:
                self._rest(each)
        self._gather(unit, now)
        if self._overlaps and unit in self._ended:
            while self._ended.pop() != unit:
                pass
            before = reversed(self._ended)
            self._ahead((u for u in before if self._units[u].strategy.lifetime == "use"), now)

    def _begin_gradients(self, unit: int) -> None:
        self._touched.add(unit)
        costs = self._costs[unit]
        if self._syncs[unit]:
            self._buffers["packed", unit] = costs.packed
            self._buffers["sum", unit] = costs.out
        else:
            self._buffers["partial", unit] = costs.partial

    def _completed(self, unit: int, now: Held) -> None:
        self._begin_gradients(unit)
        self._look(now)
        if not self._syncs[unit]:
            return
        self._buffers.pop(("partial", unit), None)
        self._complete.add(unit)
        if not self._costs[unit].has_frozen:
            self._done_with.append(unit)
        for each in reversed(list(self._forward_order)):
            if each in self._complete:
                del self._forward_order[each]
                self._issue(each, now)
            elif each in self._touched:
                return

    def _through(self, unit: int) -> None:
        self._open[unit] -= 1
        if not self._open[unit]:
            self._rest(unit)
            if self._in_backward == unit:
                self._in_backward = len(self._units) - 1

    def _end_backward(self, now: Held) -> None:
        for unit in [*reversed(list(self._forward_order)), *self._order]:
            is_needed = unit in self._touched or ("partial", unit) in self._buffers
            if is_needed and unit not in self._issued and self._syncs[unit]:
                self._begin_gradients(unit)
                self._buffers.pop(("partial", unit), None)
                self._issue(unit, now)
        while self._in_flight:
            self._deliver()
        for unit in self._order:
            self._rest(unit)

    def _issue(self, unit: int, now: Held) -> None:
        self._complete.discard(unit)
        self._issued.add(unit)
        if self._way.is_ordered:
            while self._in_flight:  # one at a time, where it runs beside computing
                self._deliver()
        if self._costs[unit].num_reductions:
            self._event("RS", unit)
            self._in_flight.append(unit)
        self._look(now)
        if not self._overlaps and self._way.is_ordered:
            while self._in_flight:
                self._deliver()

    def _deliver(self) -> None:
        unit = self._in_flight.pop(0)
        for _ in range(self._costs[unit].num_reductions):
            self._event("G", unit)
        out = self._buffers.pop(("sum", unit), 0)
        self._buffers.pop(("packed", unit), None)
        grads = self._costs[unit].grads
        if self._way.frees_gradients or self._way.keeps_shards_on_host:
            return
        if unit not in self._grads:
            self._grads[unit] = grads
            self._buffers["padding", unit] = max(0, out - grads)

    # -- copies ----------------------------------------------------------------------------------
    @property
    def _overlaps(self) -> bool:
        return self._way.runs_ahead

    def _gather(self, unit: int, now: Held) -> None:
        if unit in self._there:
            return
        self._event("AG", unit)
        self._there.add(unit)
        self._buffers["staging", unit] = self._costs[unit].staging
        self._look(now)
        if not self._overlaps:
            del self._buffers["staging", unit]

    def _ahead(self, candidates: Iterable[int], now: Held) -> None:
        limit = self._way.gather_limit
        held = sum(self._costs[u].full for u in self._there)
        for unit in candidates:
            if unit not in self._there:
                if limit is not None and held + self._costs[unit].full > limit:
                    break
                self._gather(unit, now)
                held += self._costs[unit].full
            if limit is None:
                break

    def _rest(self, unit: int) -> None:
        if unit in self._there and self._units[unit].strategy.lifetime == "use":
            self._there.discard(unit)
            self._event("FR", unit)
        self._buffers.pop(("staging", unit), None)

    # -- what it comes to ------------------------------------------------------------------------
    def _event(self, code: str, unit: int) -> None:
        self.walk.events.append(Event(code, self._units[unit].name))

    def _look(self, live: Held, moment: str = "", unit: str | None = None) -> None:
        at, where = self._moment()
        point = Point(
            moment or at,
            where if unit is None else unit,
            parameters=self._parameters,
            gradients=sum(self._grads.values()),
            optimizer=self._optimizer,
            gathered=sum(self._costs[u].full for u in self._there),
            buffers=self._feedback + sum(self._buffers.values()),
            activations=live.activations,
            logits=live.logits,
        )
        self.walk.points.append((len(self.walk.events), point))
        if point.total > self.walk.peak.total:
            self.walk.peak = point
        if point.engine > self.walk.engine_peak.engine:
            self.walk.engine_peak = point
        most = self.walk.most
        for kind in KINDS:
            most[kind] = max(most[kind], getattr(point, kind))

    def _moment(self) -> tuple[str, str]:
        """What goes on, and in which unit; the root's part behind all others is the loss."""
        root, units = len(self._units) - 1, self._units
        if self._in_backward is not None:
            at = self._in_backward
            is_loss = at == root and self._touched <= {root} and root > 0
            return ("backward of the loss" if is_loss else "backward"), units[at].name
        if not self._stack:
            return ("loss" if self._calls else "forward"), units[root].name
        at = self._stack[-1]
        is_loss = at == root and root > 0 and len(set(self._calls)) == len(units)
        return ("loss" if is_loss else "forward"), units[at].name


def plain_trace(
    units: Sequence[PlannedUnit], kept: int = 0, running: int = 0, logits: int = 0
) -> Trace:
    """Of a model that is not known: units run one after the other; each leaves `kept` bytes for its
    backward, and has `running` more while it runs.
    """
    root, others = len(units) - 1, range(len(units) - 1)
    found: list[Mark] = []

    def add(what: str, unit: int, units_kept: int, more: int = 0, scores: int = 0) -> None:
        most, now = Held(units_kept * kept + more, scores), Held(units_kept * kept, scores)
        found.append(Mark(what, unit, most, now))

    add(marks.CALLED, root, 0)
    for number in others:
        add(marks.CALLED, number, number)
        add(marks.LEFT, number, number + 1, running)
    add(marks.LEFT, root, root, 0, logits)
    add(marks.FORWARD_OVER, -1, root, 0, logits)
    add(marks.REACHED, root, root, 0, logits)
    add(marks.FIRST, root, root, 0, logits)
    for number in reversed(others):
        add(marks.REACHED, number, number + 1)
        for what in (marks.FIRST, marks.COMPLETE, marks.THROUGH):
            add(what, number, number + 1, running)
    add(marks.COMPLETE, root, 0)
    add(marks.BACKWARD_OVER, -1, 0)
    return Trace(tuple(found))
