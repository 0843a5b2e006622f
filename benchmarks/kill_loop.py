"""`shardwise train` under kill -9 at random moments, started again each time until it is done.

    python benchmarks/kill_loop.py [--kills 50] [--json FILE] [--folder DIR]

Kills aim in turn at a save, at a load, at the steps and at any moment of a start; either one random
rank is killed (the launcher has to end the others by itself), or all ranks and the launcher. The
ranks are stopped first, so that their open files tell where the moment fell. After each kill:

- every checkpoint that counts is whole, the newest is not older than before, and of the steps that
  were done no more are lost than since the last save that was due: one interval of
  `checkpoint.every`, two where saves run in the background (one may be under way);
- the next start says that it continues from that checkpoint.

At the end losses and norms of all steps, and weights, optimizer state and random state of the last
checkpoint equal those of a run that nobody killed, bit for bit. Exits with 1 if anything of this
does not hold, or if saves, loads, steps, single ranks or whole jobs were hit too rarely to say so.

On SIGTERM it kills no more and goes to the end with the kills that it has. With `--folder` the run
is kept, and another call with the same commit adds kills to it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardwise.bench.machine import describe
from shardwise.checkpoint import store
from shardwise.checkpoint.comparing import compare
from shardwise.checkpoint.importing import open_source
from shardwise.train.metrics import read_metrics

NUM_RANKS, EVERY = 2, 3
# Checkpoints of 26 MB: saves and loads last long enough to be hit.
SIZES = {
    "model.dim": 64,
    "model.layers": 2,
    "model.heads": 2,
    "model.vocab_size": 16384,
    "data.seq_len": 32,
    "train.global_batch": 8,
    "train.micro_batch": 4,
    "train.eval_every": 0,
    "optim.schedule": "constant",  # the number of steps is known at the end only
    "checkpoint.every": EVERY,
    "run.device": "cpu",
}
REHEARSAL = (".rehearsal_", ".saving_.rehearsal_")
SAVE = (".saving_step_", ".deleting_")
# What a kill waits for, and how long it may then wait on: about as long as that lasts.
AIMS = {"save": 0.02, "load": 0.003, "step": 1.0, "any": 8.0}
ENDLESS, MORE_STEPS = 10**6, 10  # while it is killed, and after the last kill


class PromiseError(Exception):
    """A promise that did not hold."""


@dataclass
class Kill:
    """`moment`: where the stopped ranks were; `done`: the last step with a row in metrics.jsonl."""

    aim: str
    moment: str
    whom: str
    background: bool
    newest: int
    done: int
    ended_after_s: float
    half_written: int
    told: bool  # the start said where it continues

    @property
    def phase(self) -> str:
        """The moment, with a load that lasts from its first checkpoint file to its metrics file:
        who aims at one has seen such a file open, whether or not one is open when ranks stop."""
        return "load" if self.aim == "load" and self.moment == "start" else self.moment


class Start:
    """One start of the job: the launcher and its ranks."""

    def __init__(self, run: Path, steps: int, background: bool) -> None:
        self.run, self.background, self.log = run, background, run.with_suffix(".log")
        words = [f"--{key}={value}" for key, value in SIZES.items()]
        words += [f"--run.dir={run}", f"--train.steps={steps}", f"--nproc={NUM_RANKS}"]
        words += [f"--checkpoint.background={str(background).lower()}"]
        with self.log.open("w") as log:
            self.launcher = subprocess.Popen(
                [sys.executable, "-m", "shardwise.cli", "train", *words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )

    def ranks(self) -> list[int]:
        """Process ids, by rank; of those that have been started and live."""
        found = {}
        for tasks in Path(f"/proc/{self.launcher.pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                for pid in map(int, tasks.read_text().split()):
                    words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                    named = dict(word.partition(b"=")[::2] for word in words)
                    if b"RANK" in named:
                        found[int(named[b"RANK"])] = pid
        return [found[rank] for rank in sorted(found)]

    def moment(self, ranks: list[int]) -> str:
        """What the ranks are in, from the files that they have open and those that are there."""
        checkpoints, opened = self.run / "checkpoints", set[str]()
        for pid in ranks:
            with contextlib.suppress(OSError):
                for fd in os.listdir(f"/proc/{pid}/fd"):
                    with contextlib.suppress(OSError):
                        opened.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
        if str(self.run / "metrics.jsonl") not in opened:  # opened once all is loaded
            return "load" if any(f"{checkpoints}/step_" in path for path in opened) else "start"
        names = os.listdir(checkpoints)
        if any(name.startswith(REHEARSAL) for name in names):
            return "rehearsal"
        return "save" if any(name.startswith(SAVE) for name in names) else "step"

    def done(self) -> int:
        rows = read_metrics(self.run / "metrics.jsonl")
        return rows[-1]["step"] if rows else 0

    def wait_until_saved(self) -> None:
        deadline = time.monotonic() + 240
        while not store.list_checkpoints(self.run / "checkpoints").complete:
            if time.monotonic() > deadline:
                raise PromiseError(f"no checkpoint within 240 s:\n{self.log.read_text()}")
            self._check_alive()
            time.sleep(0.05)

    def kill_at(self, aim: str, draw: random.Random) -> tuple[str, str, float]:
        """The moment, whom, and how long the launcher took to end."""
        deadline = time.monotonic() + 240
        while aim not in ("any", moment := self.moment(self.ranks())):
            if aim == "load" and moment not in ("start", "load"):
                break  # it was too short to be seen: the kill counts where it falls
            if time.monotonic() > deadline:
                raise PromiseError(f"no {aim} within 240 s:\n{self.log.read_text()}")
            self._check_alive()
            time.sleep(0.001)
        time.sleep(draw.uniform(0.0, AIMS[aim]))
        self._check_alive()
        ranks, killed_one = self.ranks(), draw.random() < 0.5
        for pid in ranks:
            os.kill(pid, signal.SIGSTOP)
        for pid in ranks:
            while _state(pid) not in "TZX":
                time.sleep(0.0005)
        moment = self.moment(ranks)
        if killed_one and len(ranks) == NUM_RANKS:
            victim = draw.randrange(NUM_RANKS)
            whom = f"rank {victim}"
            os.kill(ranks[victim], signal.SIGKILL)
            for pid in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
        else:
            whom = "all"
            for pid in (*ranks, self.launcher.pid):
                os.kill(pid, signal.SIGKILL)
        killed_s = time.monotonic()
        try:
            code = self.launcher.wait(120)
        except subprocess.TimeoutExpired:
            raise PromiseError(
                f"{whom} was killed, and the launcher did not end in 120 s"
            ) from None
        if code != (-signal.SIGKILL if whom == "all" else 1):
            raise PromiseError(f"{whom} was killed, and the exit code was {code}")
        for pid in ranks:  # the kernel may take a moment for it
            while _state(pid) not in "ZX":
                if time.monotonic() > killed_s + 120:
                    raise PromiseError(f"{whom} was killed, and process {pid} lives on")
                time.sleep(0.01)
        return moment, whom, time.monotonic() - killed_s

    def _check_alive(self) -> None:
        if (code := self.launcher.poll()) is not None:
            text = self.log.read_text()
            raise PromiseError(f"the job ended by itself with exit code {code}:\n{text}")

    def check_beginning(self, newest: int) -> bool:
        """Whether it told where it began, which has to be `newest`; it may have been killed
        before."""
        told = [line for line in self.log.read_text().splitlines() if "continuing from" in line]
        if told and not told[0].endswith(store.step_name(newest)):
            raise PromiseError(f"step {newest} was the newest, but: {told[0]}")
        return bool(told)

    def end(self) -> None:
        """Ends what may be left of it."""
        with contextlib.suppress(ProcessLookupError):
            self.launcher.kill()  # its ranks die with it
        self.launcher.wait()


def _state(pid: int) -> str:
    """The letter of /proc; X where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def check_left(run: Path, before: int) -> tuple[int, int]:
    """The step of the newest checkpoint and the number of half-written ones."""
    found = store.list_checkpoints(run / "checkpoints")
    step = found.complete[0].step if found.complete else 0
    damaged = [text for c in found.complete for text in store.verify(c)]
    damaged += [text for _, text in found.skipped]
    if damaged:
        raise PromiseError(f"a checkpoint that counts is damaged: {damaged}")
    if step < before:
        raise PromiseError(f"step {before} was saved, now {step} is the newest")
    return step, len(list((run / "checkpoints").glob(".*")))


def kill_once(run: Path, kills: list[Kill], draw: random.Random) -> Kill:
    """A start and its end."""
    before, _ = check_left(run, kills[-1].newest if kills else 0)
    background = draw.random() < 0.5
    aim = tuple(AIMS)[len(kills) % len(AIMS)]
    start = Start(run, ENDLESS, background)
    try:
        if aim == "load" and not before:  # there is nothing to load yet: not before this is past
            aim = "any"
            start.wait_until_saved()
        moment, whom, took_s = start.kill_at(aim, draw)
    finally:
        start.end()
    told = start.check_beginning(before) if before else False
    newest, half_written = check_left(run, before)
    done = 0
    if moment in ("save", "rehearsal", "step"):
        done = start.done()
        if done > before > 0 and not told:
            raise PromiseError(f"the start after step {before} did not say that it continues")
        # The row of a step is written before it is saved; a save in the background is complete
        # when the next one begins.
        due = (done - 1) // EVERY * EVERY - (EVERY if background else 0)
        if newest < due:
            raise PromiseError(
                f"step {done} was done, {due} was to be saved, {newest} is the newest"
            )
    took_s = round(took_s, 2)
    return Kill(aim, moment, whom, background, newest, done, took_s, half_written, told)


def numbers(run: Path) -> list[tuple[int, str, str]]:
    rows = read_metrics(run / "metrics.jsonl")
    return [(row["step"], row["loss"].hex(), row["grad_norm"].hex()) for row in rows]


def compare_ends(folder: Path, steps: int) -> dict[str, Any]:
    """The killed run and the whole one."""
    ours, theirs = numbers(folder / "run"), numbers(folder / "whole")
    result: dict[str, Any] = {
        "steps": steps,
        "equal_rows_of_loss_and_norm": sum(a == b for a, b in zip(ours, theirs, strict=False)),
    }
    if [row[0] for row in ours] != list(range(1, steps + 1)) or ours != theirs:
        raise PromiseError(f"other losses or norms than of the run that nobody killed: {result}")
    left, right = open_source(folder / "run"), open_source(folder / "whole")
    for kind in ("model", "optim", "rng"):
        found = compare(left, right, f"{kind}.")
        if found or not found.num_equal:
            raise PromiseError(f"{kind} differs at the end: {found.to_json()}")
        result[f"equal_tensors_{kind}"] = found.num_equal
    return result


def check_coverage(kills: list[Kill]) -> dict[str, dict[str, int]]:
    """How often each kind was hit; PromiseError if too rarely to show anything."""
    moments, whom = Counter(k.phase for k in kills), Counter(k.whom for k in kills)
    least = max(1, len(kills) // 10)
    wanted = {**{m: moments[m] for m in ("save", "load", "step")}, "all": whom["all"]}
    wanted["one rank"] = len(kills) - whom["all"]
    for name, count in wanted.items():
        if count < least:
            raise PromiseError(
                f"{name} was hit {count} times, at least {least} of {len(kills)} are wanted"
            )
    reading = {"with a checkpoint file open": sum(k.moment == "load" for k in kills)}
    return {"moments": dict(moments), "of the loads": reading, "whom": dict(whom)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    enough = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: enough.set())
    with tempfile.TemporaryDirectory(prefix="kill_loop_") as name:
        folder = options.folder or Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        result: dict[str, Any] = {"machine": describe(), "seed": options.seed, "holds": False}
        try:
            kills = earlier_kills(folder, result["machine"]["commit"])
            while len(kills) < options.kills and not enough.is_set():
                draw = random.Random(f"{options.seed}-{len(kills)}")
                kills.append(kill_once(folder / "run", kills, draw))
                print(f"{len(kills)}: {kills[-1]}", file=sys.stderr, flush=True)
                kept = {"commit": result["machine"]["commit"], "kills": [asdict(k) for k in kills]}
                (folder / "kills.json").write_text(json.dumps(kept))
            result["num_kills"] = len(kills)
            result["starts_that_said_where_they_continue"] = sum(k.told for k in kills)
            result |= check_coverage(kills)
            result["end"] = end(folder, kills)
            result["holds"] = True
        except PromiseError as error:
            result["wrong"] = str(error)
    if options.json is not None:
        whole = {**result, "kills": [asdict(kill) for kill in kills]}
        options.json.write_text(json.dumps(whole, indent=1) + "\n")
    print(json.dumps({k: v for k, v in result.items() if k != "machine"}))
    return 0 if result["holds"] else 1


def earlier_kills(folder: Path, commit: str) -> list[Kill]:
    """Those of another call."""
    try:
        kept = json.loads((folder / "kills.json").read_text())
    except FileNotFoundError:
        return []
    if kept["commit"] != commit:
        sys.exit(f"{folder} holds a run of commit {kept['commit']}, this is {commit}")
    return [Kill(**kill) for kill in kept["kills"]]


def end(folder: Path, kills: list[Kill]) -> dict[str, Any]:
    """The last start, and the run that nobody kills."""
    steps = kills[-1].newest + MORE_STEPS
    shutil.rmtree(folder / "whole", ignore_errors=True)  # of a call before
    for name in ("whole", "run"):
        last = Start(folder / name, steps, background=False)
        try:
            if last.launcher.wait(3600):
                raise PromiseError(f"the last start failed:\n{last.log.read_text()}")
        finally:
            last.end()
    if kills[-1].newest and not last.check_beginning(kills[-1].newest):
        raise PromiseError("the last start did not say that it continues")
    return compare_ends(folder, steps)


if __name__ == "__main__":
    sys.exit(main())
