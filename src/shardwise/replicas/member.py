"""A rank's side: its stream to the coordinator.

member = Member("10.0.0.1:29600", name="a", rank=0, world=2, seed=1, shapes=..., boxes=...)
start = member.join(values)              # theta of its boxes, and how many steps to train
start = member.exchange(differences)     # after so many steps
member.leave()
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from shardwise.errors import ConfigError, ShardwiseError, TransportError
from shardwise.replicas import frames, parts
from shardwise.replicas.outer import Shapes

TOKEN_VARIABLE = "SHARDWISE_REPLICAS_TOKEN"
_CONNECT_S = 60.0  # for a coordinator that starts at the same time
_LOOK_S = 0.2


class StoppedError(ShardwiseError):
    """Asked to stop before the replicas had begun."""


@dataclass(frozen=True, slots=True)
class Start:
    """Of a round: train `steps` steps from `theta`, together with `replicas` in all."""

    number: int
    steps: int
    replicas: int
    theta: list[Tensor]


class Member:
    def __init__(
        self,
        coordinator: str,
        *,
        name: str,
        rank: int,
        world: int,
        seed: int,
        shapes: Shapes,
        boxes: parts.Boxes,
        form: str = "exact",
    ) -> None:
        self._address, self._boxes, self._form = coordinator, boxes, form
        self._about = {
            "op": "join", "name": name, "rank": rank, "world": world, "seed": seed,
            "token": os.environ.get(TOKEN_VARIABLE, ""),
            "shapes": [[key, list(shape)] for key, shape in shapes.items()],
            "boxes": [[key, list(box.start), list(box.size)] for key, box in boxes],
        }  # fmt: skip
        self._stream: socket.socket | None = None
        self._number = -1

    def join(
        self, values: Sequence[Tensor], stopped: Callable[[], object] = lambda: False
    ) -> Start:
        """`values` are the weights of this rank's boxes, which the first replica brings. Waits for
        the others, unless `stopped`: then StoppedError."""
        self._stream = self._connect(stopped)
        frames.keep_alive(self._stream)
        self._send(self._about)
        return self._started(values, stopped)

    def exchange(self, differences: Sequence[Tensor]) -> Start:
        """theta - weights, one for each box. Waits for the others."""
        self._send(
            {"op": "sent", "round": self._number, "form": self._form},
            parts.pack(differences, self._form),
        )
        return self._started(())

    def leave(self) -> None:
        if self._stream is not None:
            with contextlib.suppress(OSError):  # it has ended before us
                frames.send(self._stream, {"op": "leave"})
            self.close()

    def close(self) -> None:
        """Without a word, as a death would."""
        if self._stream is not None:
            frames.shut(self._stream)
            self._stream = None

    def _started(
        self, values: Sequence[Tensor], stopped: Callable[[], object] | None = None
    ) -> Start:
        assert self._stream is not None
        limit = parts.num_bytes(self._boxes, "exact")
        while True:
            while stopped and not select.select([self._stream], [], [], _LOOK_S)[0]:
                self._check(stopped)
            try:
                header, data = frames.receive(self._stream, limit)
            except TransportError as error:
                raise TransportError(self._lost(str(error))) from None
            if header.get("op") == "error":
                raise ConfigError(str(header.get("text")))
            if header.get("op") == "start":
                break
            self._send({"op": "theta"}, parts.pack(values, "exact"))
        theta = [values for _, _, values in parts.unpack(data, self._boxes, "exact")]
        self._number = int(header["round"])
        return Start(self._number, int(header["steps"]), int(header["replicas"]), theta)

    def _send(self, header: dict, payload: Sequence[memoryview] = ()) -> None:
        assert self._stream is not None
        try:
            frames.send(self._stream, header, payload)
        except OSError as error:
            raise TransportError(self._lost(str(error))) from None

    def _check(self, stopped: Callable[[], object]) -> None:
        if stopped():
            self.close()
            raise StoppedError("stopped while it waited for other replicas")

    def _connect(self, stopped: Callable[[], object]) -> socket.socket:
        host, _, port = self._address.rpartition(":")
        end = time.monotonic() + _CONNECT_S
        while True:
            try:
                stream = socket.create_connection((host, int(port)), timeout=_CONNECT_S)
                stream.settimeout(None)
                return stream
            except OSError as error:
                if time.monotonic() > end:
                    raise ConfigError(
                        f"replicas.coordinator: nobody answers at {self._address} "
                        f"({error.strerror or error}); start `shardwise replicas` there first"
                    ) from None
                self._check(stopped)
                time.sleep(_LOOK_S)

    def _lost(self, why: str) -> str:
        return (
            f"replicas.coordinator: {self._address} is lost ({why}), or another rank of this "
            "replica has ended; start `shardwise replicas` with the same --dir again if it has "
            "ended, then this job: it goes on from its last checkpoint"
        )
