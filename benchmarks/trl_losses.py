"""Per-step losses beside TRL's `SFTTrainer`: the same weights, chats, order and optimizer, on CPU.

    python benchmarks/trl_losses.py [MODEL_DIR] [--chats FILE] [--json FILE] [--steps 6]
                                    [--ranks 1,2] [--folder DIR]

Without MODEL_DIR: a tiny random model. shardwise runs `shardwise train` with TRL's learning rate,
betas, weight decay, clipping and schedule; TRL runs (trl_rank.py) with its defaults and, in turn:

    matched        assistant_only_loss=True with a template that has marks, bf16=False
    rank_means     that, with average_tokens_across_devices=False (more than one rank)
    evaluated      matched, but `evaluate()` is called before `train()` (more than one rank)
    whole_fp32     bf16=False alone
    defaults       nothing set

What trains the same tokens in the same precision has to agree; every other difference has to be
what a plain model predicts from the losses of single tokens. Exit code 1 where either fails; the
last line of stdout is the result. Needs `pip install "shardwise[integrations]"`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from shardwise.bench.machine import describe
from shardwise.train.config_file import load_config
from shardwise.train.data import open_data
from shardwise.train.evaluation import chosen_samples
from shardwise.train.metrics import read_metrics
from shardwise.train.order import SampleOrder
from shardwise.train.schedule import learning_rate
from tiny_model import make_chats, make_model
from trl_predictions import Predictions

GLOBAL_BATCH, MICRO_BATCH, HELD_OUT, EVAL_BATCHES = 8, 2, 11, (1, 2, 8)
LENGTH = 1024  # TRL's default
# One forward with equal weights: sums of some hundred float32 losses in another order.
FIRST = 1e-5
# Later steps carry on how gradients are rounded, which AdamW's first steps, sign by sign, enlarge.
LATER = 1e-4
# TRL's default precision: 8 bits of mantissa in each matrix product.
BF16 = 1e-2
CASES: dict[str, dict[str, Any]] = {
    "matched": {"bf16": False, "assistant_only_loss": True},
    "rank_means": {
        "bf16": False,
        "assistant_only_loss": True,
        "average_tokens_across_devices": False,
    },
    "evaluated": {"bf16": False, "assistant_only_loss": True},
    "whole_fp32": {"bf16": False},
    "defaults": {},
}
FOR_SEVERAL_RANKS = ("rank_means", "evaluated")
# The turn of a ChatML template, and the same with marks around what the assistant says.
TURN = "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
MARKED = (
    "{% if message['role'] == 'assistant' %}{{ '<|im_start|>assistant\n' }}{% generation %}"
    "{{ message['content'] + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}" + TURN
) + "{% endif %}"


@dataclass
class Job:
    """What both train on, and where."""

    model: Path
    chats: Path
    folder: Path
    steps: int
    defaults: dict[str, Any]  # of TRL
    template: Path = field(init=False)
    samples: dict[str, list[tuple[list[int], list[int]]]] = field(init=False)  # tokens and labels

    def __post_init__(self) -> None:
        self.template = self.folder / "marked.jinja"
        self.template.write_text(marked_template(self.model))
        data = open_data(load_config(None, list(self.keys("order").items())).config, None)
        order = SampleOrder(len(data.train), seed=0)
        rows = order.indices(0, self.steps * GLOBAL_BATCH)
        if len(rows) > len(data.train):
            sys.exit(f"--steps: at most {len(data.train) // GLOBAL_BATCH}, one epoch of the chats")
        held_out: Any = data.held_out
        chosen = chosen_samples(len(held_out), HELD_OUT)
        self.samples = {
            "train": [document(data.train, int(row)) for row in rows],
            "held_out": [document(held_out, int(row)) for row in chosen],
        }
        self._write_chats()

    def _write_chats(self) -> None:
        """The chats of these samples, in this order; they are found by their tokens."""
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(self.model)
        by_tokens = {}
        for line in self.chats.read_text(encoding="utf-8").splitlines():
            ids = tokenizer.apply_chat_template(json.loads(line)["messages"], return_dict=True)
            by_tokens[tuple(ids["input_ids"])] = line
        for part, samples in self.samples.items():
            lines = [by_tokens[tuple(tokens)] for tokens, _ in samples]
            (self.folder / f"{part}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def keys(self, name: str) -> dict[str, str]:
        """Of our job: TRL's optimizer. Its schedule falls from the first step on and would be zero
        in a step more than it takes; ours begins behind the warm-up and is zero in the last."""
        theirs = self.defaults
        return {
            "run.dir": str(self.folder / name),
            "run.device": "cpu",
            "model.kind": "hf",
            "model.path": str(self.model),
            "data.format": "chat",
            "data.source": str(self.chats),
            "data.seq_len": str(LENGTH),
            "data.held_out": "0.2",
            "data.packing": "false",
            "train.steps": str(self.steps + 1),
            "train.global_batch": str(GLOBAL_BATCH),
            "train.micro_batch": str(MICRO_BATCH),
            "train.grad_clip": str(theirs["max_grad_norm"]),
            "train.eval_every": str(self.steps + 1),
            "train.eval_at_start": "true",
            "train.eval_samples": str(HELD_OUT),
            "optim.lr": str(theirs["learning_rate"]),
            "optim.betas": str([theirs["adam_beta1"], theirs["adam_beta2"]]),
            "optim.eps": str(theirs["adam_epsilon"]),
            "optim.weight_decay": str(theirs["weight_decay"]),
            "optim.schedule": theirs["lr_scheduler_type"],
            "optim.warmup_steps": "1",
            "optim.final_lr_ratio": "0",
            "checkpoint.every": "0",
            "checkpoint.rehearsal": "false",
            "checkpoint.export": "false",
            "log.trackers": "none",
        }


def marked_template(model: Path) -> str:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    template = tokenizer.chat_template
    if TURN not in template:
        sys.exit(f"{model}: its chat template is not ChatML; there is no place for marks")
    return template.replace(TURN, MARKED)


def document(samples: Any, row: int) -> tuple[list[int], list[int]]:
    ((tokens, labels),) = samples.documents(row)
    return tokens.tolist(), labels.tolist()


def trl_defaults(folder: Path) -> dict[str, Any]:
    from trl import SFTConfig

    config = SFTConfig(output_dir=str(folder), use_cpu=True)
    names = (
        "learning_rate lr_scheduler_type warmup_steps optim adam_beta1 adam_beta2 adam_epsilon "
        "weight_decay max_grad_norm bf16 gradient_checkpointing packing max_length "
        "assistant_only_loss completion_only_loss average_tokens_across_devices loss_type "
        "per_device_train_batch_size per_device_eval_batch_size train_sampling_strategy"
    ).split()
    found = {name: getattr(config, name) for name in names}
    return {name: getattr(value, "value", value) for name, value in found.items()}


def own_template(model: Path) -> str:
    """What TRL says of the model's own template when the assistant's tokens alone are wanted."""
    from transformers import AutoTokenizer
    from trl import get_training_chat_template

    try:
        get_training_chat_template(processing_class=AutoTokenizer.from_pretrained(model))
    except ValueError as error:
        return f"refused: {' '.join(str(error).split())[:200]}"
    return "taken"


def run_ours(job: Job, num_ranks: int) -> dict[str, Any]:
    name = f"shardwise_{num_ranks}"
    words = [f"--{key}={value}" for key, value in job.keys(name).items()]
    command = ["-m", "shardwise.cli", "train", *words, f"--nproc={num_ranks}"]
    run(job, name, command, num_ranks)
    rows = read_metrics(job.folder / name / "metrics.jsonl")
    steps = rows[1 : job.steps + 1]
    return {
        **{key: [row[key] for row in steps] for key in ("loss", "grad_norm", "lr")},
        "val_loss_start": rows[0]["val_loss"],
        "val_loss_end": rows[-1]["val_loss"],
    }


def run_trl(job: Job, case: str, num_ranks: int) -> dict[str, Any]:
    name = f"{case}_{num_ranks}"
    out, options = job.folder / f"{name}.result.json", dict(CASES[case])
    if options.get("assistant_only_loss"):
        options["chat_template_path"] = str(job.template)
    spec = {
        "model": str(job.model),
        "folder": str(job.folder / name),
        "train": str(job.folder / "train.jsonl"),
        "held_out": str(job.folder / "held_out.jsonl"),
        "steps": job.steps,
        "micro_batch": MICRO_BATCH,
        "accumulation": GLOBAL_BATCH // (MICRO_BATCH * num_ranks),
        "eval_batches": EVAL_BATCHES,
        "options": options,
        "evaluate_first": case == "evaluated",
        "out": str(out),
    }
    file = job.folder / f"{name}.json"
    file.write_text(json.dumps(spec))
    script = [str(Path(__file__).with_name("trl_rank.py")), str(file)]
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
    run(job, name, script if num_ranks == 1 else [*launcher, *script], num_ranks)
    return json.loads(out.read_text())


def run(job: Job, name: str, words: list[str], num_ranks: int) -> None:
    threads = str(max(1, (os.cpu_count() or 1) // num_ranks))
    offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    log = job.folder / f"{name}.log"
    print(f"{name} ...", file=sys.stderr, flush=True)
    with log.open("w") as file:
        done = subprocess.run(
            [sys.executable, *words],
            stdout=file,
            stderr=file,
            env={**os.environ, **offline, "OMP_NUM_THREADS": threads},
            check=False,
        )
    if done.returncode:
        sys.exit(f"{name} ended with {done.returncode}:\n{log.read_text()[-4000:]}")


def relative(found: float, expected: float) -> float:
    return abs(found - expected) / max(abs(expected), 1e-30)


def check(what: str, found: float, expected: float, tolerance: float) -> dict[str, Any]:
    off = relative(found, expected)
    numbers = {"found": found, "expected": expected, "relative": off, "tolerance": tolerance}
    return {"what": what, **numbers, "holds": off <= tolerance}


def checks_of(
    job: Job, num_ranks: int, ours: dict[str, Any], theirs: dict[str, Any], p: Predictions
) -> list[dict[str, Any]]:
    """That the matched job agrees, and that every other one differs by what is predicted."""
    found, on = [], f"{num_ranks} rank{'s' if num_ranks > 1 else ''}"
    matched = theirs["matched"]
    for name in ("loss", "grad_norm"):
        for step, (mine, other) in enumerate(zip(ours[name], matched[name], strict=True), 1):
            limit = FIRST if step == 1 and name == "loss" else LATER
            found.append(check(f"{on}: {name} of step {step}, matched", other, mine, limit))
    for step, (mine, other) in enumerate(zip(ours["lr"], matched["lr"], strict=True), 1):
        found.append(check(f"{on}: lr of step {step}", other, mine, 1e-12))
    answers, whole = p.of("train", "answers"), p.of("train", "whole")
    found.append(check(f"{on}: ours, first loss", ours["loss"][0], answers.mean(), FIRST))
    for case, value in (
        ("whole_fp32", whole.mean()),
        ("defaults", whole.mean()),
        ("rank_means", answers.mean_of_ranks(MICRO_BATCH, num_ranks)),
    ):
        if case in theirs:
            limit = BF16 if case == "defaults" else FIRST
            found.append(check(f"{on}: {case}, first loss", theirs[case]["loss"][0], value, limit))
    for case, run in theirs.items():
        sums = run["squared_weights_of_ranks"]
        differ = len(set(sums)) > 1
        what = f"{on}: {case}, ranks have different weights"
        found.append(check(what, differ, case == "evaluated", 0.0))
    held_out = p.of("held_out", "answers")
    found.append(check(f"{on}: ours, val_loss", ours["val_loss_start"], held_out.mean(), FIRST))
    for case, kind in (("matched", "answers"), ("whole_fp32", "whole")):
        if case not in theirs:
            continue
        tokens = p.of("held_out", kind)
        for size in EVAL_BATCHES:
            other = theirs[case]["val_loss_start"][str(size)]
            expected = tokens.mean_of_batches(size, num_ranks)
            found.append(check(f"{on}: {case}, eval_loss by {size}", other, expected, FIRST))
    return found


def same_words(job: Job) -> list[float]:
    """Our rates where schedule, steps and warm-up have TRL's names and numbers."""
    keys = job.keys("order") | {"train.steps": str(job.steps), "optim.warmup_steps": "0"}
    config = load_config(None, list(keys.items())).config
    return [learning_rate(config, step) for step in range(1, job.steps + 1)]


def labels_agree(job: Job, samples: list[list[list[int]]]) -> int:
    """In how many samples tokens and labels are ours; the first label is no target."""
    pairs = zip(job.samples["train"], samples, strict=True)
    return sum(mine[0] == ids and mine[1][1:] == labels[1:] for mine, (ids, labels) in pairs)


def print_table(num_ranks: int, ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    print(f"\n{num_ranks} rank(s); training loss, and the difference to shardwise")
    print("step  " + f"{'shardwise':>12}" + "".join(f"{case:>24}" for case in theirs))
    for step, mine in enumerate(ours["loss"]):
        cells = [
            f"{t['loss'][step]:12.6f} {t['loss'][step] - mine:+11.1e}" for t in theirs.values()
        ]
        print(f"{step + 1:>4}  {mine:12.6f}" + "".join(cells))
    for when in ("start", "end"):
        cells = []
        for other in theirs.values():
            losses = other[f"val_loss_{when}"].values()
            cells.append("/".join(f"{loss:.4f}" for loss in losses).rjust(24))
        print(f"{when:>5} {ours[f'val_loss_{when}']:12.6f}" + "".join(cells))
    print(f"(start, end: evaluation loss; TRL's in batches of {'/'.join(map(str, EVAL_BATCHES))})")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", type=Path, metavar="MODEL_DIR")
    parser.add_argument("--chats", type=Path, help="JSONL; with MODEL_DIR")
    parser.add_argument("--json", type=Path, help="write the result there too")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--ranks", default="1,2")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--folder", type=Path, help="keep what the runs write there")
    args = parser.parse_args()
    if (args.model is None) != (args.chats is None):
        parser.error("MODEL_DIR and --chats go together")
    with tempfile.TemporaryDirectory(prefix="trl_losses_") as name:
        folder = (args.folder or Path(name)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        model = args.model or make_model(folder / "model")
        chats = args.chats or make_chats(folder / "chats.jsonl")
        job = Job(model.absolute(), chats.absolute(), folder, args.steps, trl_defaults(folder))
        worlds = [int(number) for number in args.ranks.split(",")]
        result = compare(job, worlds, args.cases.split(","))
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))
    return 0 if result["holds"] else 1


def compare(job: Job, worlds: list[int], chosen: list[str]) -> dict[str, Any]:
    versions = {n: metadata.version(n) for n in ("trl", "transformers", "accelerate", "datasets")}
    result: dict[str, Any] = {
        "machine": describe() | versions,
        "model": job.model.name,
        "steps": job.steps,
        "global_batch": GLOBAL_BATCH,
        "micro_batch": MICRO_BATCH,
        "trl_defaults": job.defaults,
        "own_template_with_assistant_only_loss": own_template(job.model),
        "our_rates_with_trl_s_words": same_words(job),
        "runs": {},
        "checks": [],
    }
    first = {part: s[:GLOBAL_BATCH] if part == "train" else s for part, s in job.samples.items()}
    predictions = Predictions.of_model(job.model, first)
    for num_ranks in worlds:
        ours = run_ours(job, num_ranks)
        cases = [case for case in chosen if num_ranks > 1 or case not in FOR_SEVERAL_RANKS]
        theirs = {case: run_trl(job, case, num_ranks) for case in cases}
        samples = {case: run.pop("samples") for case, run in theirs.items()}
        equal = labels_agree(job, samples["matched"])
        count = len(job.samples["train"])
        what = f"{num_ranks} ranks: samples with equal tokens and labels"
        result["checks"] += [check(what, equal, count, 0.0)]
        result["checks"] += checks_of(job, num_ranks, ours, theirs, predictions)
        result["runs"][str(num_ranks)] = {"shardwise": ours, **theirs}
        print_table(num_ranks, ours, theirs)
    result["predicted"] = predictions.summary(MICRO_BATCH, EVAL_BATCHES)
    failed = [c for c in result["checks"] if not c["holds"]]
    for found in failed:
        print(f"DIFFERS {found}")
    result["holds"] = not failed
    return result


if __name__ == "__main__":
    sys.exit(main())
