"""What the engine did, in order: the raw material of golden tests, metrics, the doctor and reports.

An event is a code and the unit it concerns. `EventLog.text()` is the golden form, e.g. `AG
layers.1 | F layers.0`.

    F    forward of a unit runs          AG   gather issued
    B    backward of a unit begins       HG   shards gathered from the replicas that share them
    RS   reduction issued, with that          out, once per write
         over replicas                   FR   full copy released
    G    sharded gradients delivered
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Event:
    code: str
    unit: str


@dataclass(slots=True)
class EventLog:
    """Collects events while it is attached to a model's engine."""

    events: list[Event] = field(default_factory=list)

    def add(self, code: str, unit: str) -> None:
        self.events.append(Event(code, unit))

    def clear(self) -> None:
        self.events.clear()

    def codes(self, *wanted: str) -> list[Event]:
        """The events of these codes."""
        return [e for e in self.events if e.code in wanted]

    def text(self, *wanted: str) -> str:
        """One line, for golden tests; all codes when none is named."""
        events = self.codes(*wanted) if wanted else self.events
        return " | ".join(f"{e.code} {e.unit}" for e in events)
