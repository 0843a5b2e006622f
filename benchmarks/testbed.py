"""Two hosts on one machine: network namespaces joined by a cable of a given rate.

    benchmark --pipe--> host 0 (network, UTS, IPC, mount and pid namespace)   10.77.0.1  cable --.
              --pipe--> host 1 (the same)                                     10.77.0.2  cable --'

A host is a process that reads a pipe from the benchmark: the first process of its own pid
namespace, with a host name, a /dev/shm and System V memory of its own, and no interface but
loopback and its end of the cable (a veth pair, MTU 9,000, never in the benchmark's own namespace).
So no packet leaves the two, and ranks of different hosts have nothing in common but the cable and
files. When the benchmark ends, in whatever way, also by SIGKILL, the pipe closes, the host ends,
and the kernel ends all its processes and removes namespaces and cable: nothing has a name that
could be left over. `leftovers` looks for hosts of benchmarks that have ended all the same, by the
pid in their host's name, and `clean` ends them.

The rate is tbf's (a token bucket) at both ends, for each direction by itself. Delay is netem's,
where the kernel has it. Bytes are counted by the queue of each end: unlike the interface's own
counter, which sees blocks of up to 64 KiB with one header, it counts each segment of 9,000 bytes
with its headers, as a real card does.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

CABLE, MTU = "cable", 9000
SUBNET = "10.77.0"
BURST_BYTES, QUEUE_S = 256 * 1024, 0.02  # of the token bucket; longest wait in the queue
_TOOLS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
_NAMES = re.compile(r"shardwise-bed-(\d+)-(\d+)-([01])")  # pid of the benchmark, its start, host
_PLACES = ("--net", "--uts", "--ipc", "--mount", "--pid")
_START_LIMIT_S = 10.0
# What the first process of a host does; $1 is the subnet, $2 its name. It knows both names without
# a name server, which is not reached from there. It ends when the pipe does: nobody has to end it.
_HOLD = """
echo "$2" >/proc/sys/kernel/hostname
mount -t tmpfs tmpfs /dev/shm
echo "127.0.0.1 localhost\n$1.1 ${2%-?}-0\n$1.2 ${2%-?}-1" >/dev/shm/hosts
: >/dev/shm/resolv.conf
for file in hosts resolv.conf; do mount --bind /dev/shm/$file /etc/$file; done
echo there
read -r _
"""


class BedError(RuntimeError):
    """The kernel, or a tool, refused a part of the testbed."""


@dataclass(frozen=True, slots=True)
class Profile:
    """What the cable is like."""

    gbit_s: float
    delay_ms: float = 0.0

    @property
    def name(self) -> str:
        delay = f", {self.delay_ms:g} ms" if self.delay_ms else ""
        return f"{self.gbit_s:g} Gbit/s{delay}"


@dataclass(frozen=True, slots=True)
class Sent:
    """What an end of the cable has sent: bytes with the headers of all segments, segments, and the
    interface's own count."""

    wire_bytes: int
    packets: int
    interface_bytes: int
    dropped: int

    def __sub__(self, other: Sent) -> Sent:
        return Sent(
            self.wire_bytes - other.wire_bytes,
            self.packets - other.packets,
            self.interface_bytes - other.interface_bytes,
            self.dropped - other.dropped,
        )


def why_not() -> str:
    """What is in the way of a testbed here; empty where nothing is."""
    if os.name != "posix" or not Path("/proc/self/ns/net").exists():
        return "needs Linux with network namespaces"
    if os.geteuid() != 0:
        return "needs root, for network namespaces; start it with sudo"
    if missing := sorted({_TOOLS[tool] for tool in _TOOLS if shutil.which(tool) is None}):
        return f"needs {' and '.join(missing)}: apt-get install {' '.join(missing)}"
    try:
        with TwoHosts(Profile(1.0)):
            return ""
    except BedError as error:
        return str(error)


class Host:
    """One of the two: what runs in it is started through `command`."""

    def __init__(self, index: int, hostname: str) -> None:
        self.index, self.hostname = index, hostname
        self.address = f"{SUBNET}.{index + 1}"
        unshare = ["unshare", *_PLACES, "--fork", "--kill-child=SIGKILL", "--mount-proc"]
        self._holder = subprocess.Popen(
            [*unshare, "sh", "-ec", _HOLD, hostname, SUBNET, hostname],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True, text=True,
        )  # fmt: skip
        assert self._holder.stdout is not None
        if self._holder.stdout.readline() != "there\n":
            self._holder.wait()
            assert self._holder.stderr is not None
            why = self._holder.stderr.read().strip() or "no reason given"
            raise BedError(f"this kernel refuses a host of its own: {why}")
        self.pid = _child_of(self._holder.pid)

    def command(self, *words: str) -> list[str]:
        """Words that run in this host."""
        return ["nsenter", f"--target={self.pid}", *_PLACES, "--wd=.", *words]

    def run(self, *words: str) -> str:
        """A tool that sets up or looks, in this host's network only."""
        return _call("nsenter", f"--target={self.pid}", "--net", *words)

    @property
    def is_up(self) -> bool:
        (end,) = json.loads(self.run("ip", "-j", "link", "show", "dev", CABLE))
        return end["operstate"] == "UP"

    def close(self) -> None:
        """End it with all that runs in it."""
        with contextlib.suppress(OSError):
            assert self._holder.stdin is not None
            self._holder.stdin.close()
        try:
            self._holder.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self._holder.kill()  # takes the first process of the namespace along
            self._holder.wait()
        for stream in (self._holder.stdout, self._holder.stderr):
            if stream is not None:
                stream.close()


class TwoHosts:
    """The testbed, as long as the `with` block lasts."""

    def __init__(self, profile: Profile) -> None:
        self.hosts: list[Host] = []
        name = f"shardwise-bed-{os.getpid()}-{start_of(os.getpid())}"
        try:
            self.hosts += [Host(0, f"{name}-0")]
            self.hosts += [Host(1, f"{name}-1")]
            self._join(profile)
        except BaseException:
            self.close()
            raise

    def _join(self, profile: Profile) -> None:
        ends = [(CABLE, "netns", str(host.pid)) for host in self.hosts]
        _call("ip", "link", "add", *ends[0], "type", "veth", "peer", "name", *ends[1])
        for host in self.hosts:
            host.run("ip", "link", "set", "dev", "lo", "up")
            host.run("ip", "addr", "add", f"{host.address}/24", "dev", CABLE)
            host.run("ip", "link", "set", "dev", CABLE, "mtu", str(MTU), "up")
            shape(profile, host.run)
        end = time.monotonic() + _START_LIMIT_S
        while not all(host.is_up for host in self.hosts):  # until then nothing is sent
            if time.monotonic() > end:
                raise BedError("the cable between the hosts did not come up")
            time.sleep(0.02)

    def close(self) -> None:
        for host in self.hosts:
            host.close()
        self.hosts = []

    def __enter__(self) -> TwoHosts:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def shape(profile: Profile, run: Callable[..., str] | None = None) -> None:
    """The cable's rate, and its delay, in the direction away from the host that this runs in."""
    for words in shaping(profile):
        (run or _call)("tc", "qdisc", *words)


def sent() -> Sent:
    """Counters of the end of the cable of the host that this runs in."""
    queues = _call("tc", "-s", "-j", "qdisc", "show", "dev", CABLE)
    return read_sent(queues, Path("/proc/self/net/dev").read_text())


def shaping(profile: Profile) -> list[tuple[str, ...]]:
    """Arguments of `tc qdisc` for one end: netem, where delay is asked for, holds the bucket."""
    rate = f"{round(profile.gbit_s * 1000)}mbit"
    bucket = ("tbf", "rate", rate, "burst", str(BURST_BYTES), "latency", f"{QUEUE_S * 1000:g}ms")
    if not profile.delay_ms:
        return [("replace", "dev", CABLE, "root", "handle", "1:", *bucket)]
    in_flight = round(profile.gbit_s * 1e9 / 8 * profile.delay_ms / 1000 / 1000)  # small segments
    delay = ("netem", "delay", f"{profile.delay_ms:g}ms", "limit", str(max(1000, in_flight)))
    return [
        ("replace", "dev", CABLE, "root", "handle", "2:", *delay),
        ("replace", "dev", CABLE, "parent", "2:1", "handle", "1:", *bucket),
    ]


def read_sent(queues: str, devices: str) -> Sent:
    """From what `tc -s -j qdisc show` and /proc/net/dev say."""
    (bucket,) = [queue for queue in json.loads(queues) if queue["kind"] == "tbf"]
    (line,) = [line for line in devices.splitlines() if line.strip().startswith(f"{CABLE}:")]
    interface_bytes = int(line.split(":")[1].split()[8])
    return Sent(bucket["bytes"], bucket["packets"], interface_bytes, bucket["drops"])


def start_of(pid: int) -> int:
    """When a process started, in the kernel's ticks; 0 where there is none. Pids come again."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return 0


def leftovers() -> list[int]:
    """Holders of hosts whose benchmark has ended: there should be none."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:  # it has ended
            continue
        match = _NAMES.fullmatch(words[-2].decode(errors="replace")) if len(words) > 2 else None
        if match and start_of(int(match[1])) != int(match[2]):
            found.append(int(folder.name))
    return found


def clean() -> int:
    """End what `leftovers` finds; how many processes that were."""
    pids = leftovers()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(pids)


def _child_of(pid: int) -> int:
    children = Path(f"/proc/{pid}/task/{pid}/children")
    end = time.monotonic() + _START_LIMIT_S
    while time.monotonic() < end:
        if found := children.read_text().split():
            return int(found[0])
        time.sleep(0.01)
    raise BedError("a host did not start")


def _call(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or "no reason given").splitlines()[-1]
        shown = " ".join(word for word in words if not word.startswith("--target"))
        raise BedError(f"{shown}: {said}")
    return done.stdout
