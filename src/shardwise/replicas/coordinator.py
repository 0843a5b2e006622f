"""The process that replicas meet in: a thread for each stream, one lock, one condition.

    join     name, rank, world, seed, shapes, boxes    ->  give (theta 0, of the first replica)
                                                        ->  start: round, steps; theta of the boxes
    sent     differences of the boxes                  ->  start: the next round ...
    leave    ->  closed
    error    (text) to who cannot take part

A member that has not sent `patience_s` after the first one did is left behind: when it comes, it
is given theta of the next round, like one that joins. One of whose streams breaks is gone, and its
other ranks' streams are closed. When all have gone, and one of them in order, the coordinator ends.
"""

from __future__ import annotations

import contextlib
import hmac
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.checkpoint.boxes import Box
from shardwise.errors import CheckpointError, ConfigError, TransportError
from shardwise.replicas import frames, parts
from shardwise.replicas.outer import Outer, OuterSettings, Shapes, check_boxes, part_of
from shardwise.replicas.rounds import Member, Rounds
from shardwise.units import counted

_LOOK_S = 0.2


@dataclass(frozen=True, slots=True)
class Meeting:
    """What the coordinator is told: `steps` that replicas train alone, `replicas` with which the
    first round begins."""

    steps: int
    replicas: int
    outer: OuterSettings
    patience_s: float = 300.0
    token: str = ""


@dataclass(slots=True, eq=False)
class _Stream:
    """One rank's, and what it sends and gets."""

    socket: socket.socket
    member: Member
    rank: int
    boxes: list[tuple[str, Box]]


@dataclass(slots=True, eq=False)
class _State:
    """All that the lock guards."""

    rounds: Rounds
    outer: Outer | None = None
    giver: Member | None = None  # who brings theta 0
    given: set[int] = field(default_factory=set)
    arrived: dict[str, dict[str, Tensor]] = field(default_factory=dict)  # by member
    streams: list[_Stream] = field(default_factory=list)
    first_sent_at: float = 0.0  # in this round
    has_left: bool = False  # one that ended in order
    error: BaseException | None = None


class Coordinator:
    """`say` gets a line for each thing that happens."""

    def __init__(self, meeting: Meeting, directory: Path, say: Callable[[str], None]) -> None:
        self._meeting, self._directory, self._say = meeting, directory, say
        self._changed = threading.Condition()
        self._state = _State(Rounds(0, meeting.replicas))

    def serve(self, listener: socket.socket) -> None:
        """Until all that joined have left, or its state cannot be written."""
        listener.settimeout(_LOOK_S)
        while not self._is_done():
            self._look_for_late()
            try:
                stream, _ = listener.accept()
            except TimeoutError:
                continue
            stream.settimeout(None)
            frames.keep_alive(stream)
            threading.Thread(target=self._talk, args=(stream,), daemon=True).start()
        if self._state.error is not None:
            raise self._state.error

    def _is_done(self) -> bool:
        with self._changed:
            state = self._state
            return state.error is not None or (state.has_left and not state.streams)

    def _look_for_late(self) -> None:
        with self._changed:
            state = self._state
            since = time.monotonic() - state.first_sent_at
            if not state.first_sent_at or since < self._meeting.patience_s:
                return
            if not any(member.has_sent for member in state.rounds.active):
                return
            for member in state.rounds.drop_late():
                self._say(f"round {state.rounds.number}: goes on without {member.name}, late")
                state.arrived.pop(member.name, None)
            self._maybe_end_round()

    # -- a stream ----------------------------------------------------------------------------------
    def _talk(self, connection: socket.socket) -> None:
        stream: _Stream | None = None
        in_order = False
        try:
            stream = self._join(connection)
            self._give(stream)
            while True:
                self._start(stream)
                limit = parts.num_bytes(stream.boxes, "exact")
                header, data = frames.receive(connection, limit)
                if header.get("op") == "leave":
                    in_order = True
                    return
                self._take(stream, header, data)
        except ConfigError as error:
            with contextlib.suppress(OSError):
                frames.send(connection, {"op": "error", "text": str(error)})
        except (TransportError, OSError) as error:
            if stream is not None and not stream.member.is_gone:
                self._say(f"replica {stream.member.name}, rank {stream.rank}: {error}")
        except BaseException as error:  # noqa: BLE001 - the process ends with it
            with self._changed:
                self._state.error = error
                self._changed.notify_all()
        finally:
            if stream is not None:
                try:
                    self._end(stream, in_order)
                except BaseException as error:  # noqa: BLE001 - as above
                    self._state.error = error
            frames.shut(connection)

    def _join(self, connection: socket.socket) -> _Stream:
        header, _ = frames.receive(connection, 0)
        token = str(header.get("token", ""))
        if not hmac.compare_digest(token.encode(), self._meeting.token.encode()):
            raise ConfigError("SHARDWISE_REPLICAS_TOKEN: is not that of the coordinator")
        who, shapes, boxes = _about(header)
        check_boxes(boxes, shapes)
        with self._changed:
            state = self._state
            if state.outer is None:
                state.outer = self._open(shapes)
                state.rounds.number = state.outer.number
                if state.outer.theta is not None:
                    self._say(f"goes on at round {state.outer.number}")
            state.outer.check(shapes)
            member = state.rounds.join(*who)
            stream = _Stream(connection, member, who[1], boxes)
            state.streams.append(stream)
            if member.is_ready:
                self._say(f"replica {member.name} is there, {counted(member.world, 'rank')}")
            self._changed.notify_all()
            return stream

    def _open(self, shapes: Shapes) -> Outer:
        try:
            return Outer(shapes, self._meeting.outer, self._directory)
        except CheckpointError as error:  # of another model
            raise ConfigError(f"the state in {self._directory} does not fit: {error}") from None

    def _give(self, stream: _Stream) -> None:
        """theta 0, if this stream's replica is to bring it."""
        with self._changed:
            state = self._state
            assert state.outer is not None
            while state.outer.theta is None:
                self._still_there(stream)
                if state.giver is None and stream.member.is_ready:
                    state.giver, state.given = stream.member, set()
                    state.arrived = {stream.member.name: self._empty()}
                    self._changed.notify_all()
                if state.giver is stream.member and stream.rank not in state.given:
                    break
                self._changed.wait(_LOOK_S)
            else:
                return
        frames.send(stream.socket, {"op": "give"})
        _, data = frames.receive(stream.socket, parts.num_bytes(stream.boxes, "exact"))
        with self._changed:
            self._still_there(stream)
            whole = state.arrived[stream.member.name]
            for name, box, values in parts.unpack(data, stream.boxes, "exact"):
                part_of(whole[name], box).copy_(values)
            state.given.add(stream.rank)
            if len(state.given) == stream.member.world:
                state.outer.begin(whole)
                state.arrived = {}
                self._say(f"replica {stream.member.name} brought the first weights")
            self._changed.notify_all()
        self._give(stream)  # waits for the other ranks

    def _start(self, stream: _Stream) -> None:
        """Waits until its replica takes part in a round that it was not told of."""
        with self._changed:
            state = self._state
            while not stream.member.is_active or stream.rank in stream.member.sent:
                self._still_there(stream)
                self._changed.wait(_LOOK_S)
            assert state.outer is not None and state.outer.theta is not None
            theta, number = state.outer.theta, state.rounds.number
            others = len(state.rounds.active)
        header = {"op": "start", "round": number, "steps": self._meeting.steps, "replicas": others}
        frames.send(stream.socket, header, parts.pack(_parts(theta, stream), "exact"))

    def _take(self, stream: _Stream, header: dict[str, Any], data: bytearray) -> None:
        """What a rank has found in a round; one of a round that is over counts no more."""
        form, member = header.get("form"), stream.member
        if header.get("op") != "sent" or form not in parts.FORMS:
            raise TransportError(f"an unexpected message {header.get('op')!r}")
        found = list(parts.unpack(data, stream.boxes, str(form)))
        with self._changed:
            state = self._state
            if header.get("round") != state.rounds.number or not member.is_active:
                return
            whole = state.arrived.setdefault(member.name, {})
            if not whole:
                whole.update(self._empty())
            for name, box, values in found:
                part_of(whole[name], box).copy_(values)
            state.rounds.send(member, stream.rank)
            state.first_sent_at = state.first_sent_at or time.monotonic()
            self._maybe_end_round()

    def _maybe_end_round(self) -> None:
        """With the lock held: the outer step, if all that are there have sent."""
        state = self._state
        if state.rounds.is_over:
            assert state.outer is not None
            members = [member.name for member in state.rounds.active]
            state.outer.step([state.arrived[name] for name in members])
            self._say(f"round {state.rounds.number}: {', '.join(members)}")
            state.rounds.advance()
            state.arrived, state.first_sent_at = {}, 0.0
        self._changed.notify_all()

    def _end(self, stream: _Stream, in_order: bool) -> None:
        """A stream is over, and with it its replica's others."""
        with self._changed:
            state, member = self._state, stream.member
            state.streams.remove(stream)
            if member.is_gone:
                self._changed.notify_all()
                return
            state.has_left |= in_order
            self._say(f"replica {member.name} {'has left' if in_order else 'is gone'}")
            state.rounds.leave(member)
            if state.giver is member:
                state.giver = None
            if not in_order:
                for other in [s for s in state.streams if s.member is member]:
                    with contextlib.suppress(OSError):
                        other.socket.shutdown(socket.SHUT_RDWR)
            state.arrived.pop(member.name, None)
            if not any(other.sent for other in state.rounds.active):
                state.first_sent_at = 0.0
            self._maybe_end_round()

    def _still_there(self, stream: _Stream) -> None:
        if self._state.error is not None:
            raise TransportError("the coordinator ends")
        if stream.member.is_gone:
            raise TransportError("another rank of this replica has ended")
        if frames.has_closed(stream.socket):  # nobody reads from it meanwhile
            raise TransportError("the other side has closed the connection")

    def _empty(self) -> dict[str, Tensor]:
        assert self._state.outer is not None
        return {name: torch.zeros(shape) for name, shape in self._state.outer.shapes.items()}


def _about(
    header: dict[str, Any],
) -> tuple[tuple[str, int, int, int], Shapes, list[tuple[str, Box]]]:
    """Name, rank, ranks and seed; shapes of all parameters; this rank's parts of them."""
    try:
        name, rank, world, seed = (header[key] for key in ("name", "rank", "world", "seed"))
        shapes = {n: tuple(int(size) for size in shape) for n, shape in header["shapes"]}
        boxes = [(n, Box(tuple(start), tuple(size))) for n, start, size in header["boxes"]]
        is_sound = isinstance(name, str) and all(type(n) is int for n in (rank, world, seed))
    except (KeyError, TypeError, ValueError):
        raise TransportError("a message that is no replica's") from None
    if header.get("op") != "join" or not is_sound:
        raise TransportError("a message that is no replica's")
    return (name, rank, world, seed), shapes, boxes


def _parts(theta: Mapping[str, Tensor], stream: _Stream) -> list[Tensor]:
    return [part_of(theta[name], box) for name, box in stream.boxes]
