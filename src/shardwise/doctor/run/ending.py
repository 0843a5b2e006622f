"""How a run ended: with an error, or without a word."""

from __future__ import annotations

import re
from collections.abc import Iterator

from shardwise.checkpoint.store import list_checkpoints
from shardwise.doctor.finding import WRONG, Finding
from shardwise.doctor.run.case import Case
from shardwise.units import text_of_bytes

_NO_NUMBER = re.compile(r"step (\d+): the (loss|gradient norm) is (-?(?:nan|inf))")


def check_end(case: Case) -> Iterator[Finding]:
    if case.is_live or not case.start:
        return
    if not case.end:
        yield _killed(case)
    elif not case.end.get("ok", True):
        text = str(case.end.get("text", ""))
        match = _NO_NUMBER.search(text)
        yield _no_number(case, match) if match else _failed(case, text)


def _no_number(case: Case, match: re.Match[str]) -> Finding:
    optim, train = case.config.optim, case.config.train
    before = [row for row in case.rows if row["step"] < int(match[1])][-3:]
    seen = ", ".join(f"{row['loss']:.4g}" for row in before if "loss" in row)
    norms = ", ".join(f"{row['grad_norm']:.3g}" for row in before if "grad_norm" in row)
    text = f"log.jsonl: in step {match[1]} the {match[2]} was {match[3]}"
    if seen:
        text += f"; losses before it: {seen}"
        text += f"; gradient norms: {norms}" if norms else ""
    lines = [f"optim.lr = {optim.lr / 3:.2g}   # was {optim.lr:g}"]
    if not train.grad_clip and not optim.in_backward:
        lines.append("train.grad_clip = 1.0   # was 0: no limit")
    if optim.warmup_steps < train.steps // 20:
        lines.append(f"optim.warmup_steps = {max(1, train.steps // 20)}")
    return Finding(
        WRONG,
        "loss-no-number",
        f"the {match[2]} was no number",
        text,
        "the steps were too large for the model, or a sample of this step holds such a value; the "
        "step was not taken and the checkpoints are those of before",
        "\n".join(lines),
    )


def _failed(case: Case, text: str) -> Finding:
    return Finding(
        WRONG,
        "failed",
        "the run ended with an error",
        f"log.jsonl, after step {case.end.get('step')}: {text.splitlines()[0] if text else '?'}",
        "what one rank raised ends all; the whole text stood on the terminal of the run",
        f"shardwise train {case.path / 'config.toml'}   # goes on from {_saved(case)}",
    )


def _killed(case: Case) -> Finding:
    peak = max((row.get("peak_memory_bytes", 0) for row in case.rows), default=0)
    room, base = case.start.get("room_bytes", 0), case.start.get("base_bytes", 0)
    text = f"log.jsonl has a start and no end, and no process holds {case.path}"
    meaning = (
        "rank 0 was killed: by somebody (kill -9), by the kernel for memory, with its machine, or "
        "by the launcher because another rank had ended (the terminal of the run says why)"
    )
    if room and peak - base > 0.8 * room:
        used = f"{text_of_bytes(peak - base)} of the {text_of_bytes(room)} that a rank could take"
        text += f"; a rank used {used}"
        meaning = "memory was nearly gone, so the kernel will have ended it (dmesg says)"
    at = f"after step {case.last_step}" if case.last_step else "before its first step was over"
    return Finding(
        WRONG,
        "killed",
        f"the run ended without a word {at}",
        text,
        meaning,
        f"shardwise train {case.path / 'config.toml'} --max-restarts 3"
        f"   # goes on from {_saved(case)}",
    )


def _saved(case: Case) -> str:
    newest = next(iter(list_checkpoints(case.path / "checkpoints").complete), None)
    return f"step {newest.step}" if newest else "the beginning: nothing was saved"
