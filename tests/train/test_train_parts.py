"""Learning rate, parameter groups, metrics file, arguments: the small parts of a job."""

import io
import itertools
import json

import pytest
from torch import nn

from shardwise.errors import ConfigError
from shardwise.train.command import parse
from shardwise.train.config import Config, OptimConfig, TrainConfig
from shardwise.train.console import Console
from shardwise.train.metrics import MetricsFile, read_metrics
from shardwise.train.optimizer import build_optimizer
from shardwise.train.schedule import learning_rate


def test_learning_rate_warms_up_and_follows_the_cosine():
    config = Config(
        train=TrainConfig(steps=110),
        optim=OptimConfig(lr=1.0, warmup_steps=10, final_lr_ratio=0.1),
    )
    rates = [learning_rate(config, step) for step in range(1, 111)]
    assert rates[:10] == pytest.approx([i / 10 for i in range(1, 11)])
    assert rates[59] == pytest.approx(0.55)  # half way down
    assert rates[-1] == pytest.approx(0.1)
    assert all(a > b for a, b in itertools.pairwise(rates[9:]))


def test_constant_schedule_without_warm_up():
    config = Config(optim=OptimConfig(lr=0.5, warmup_steps=0, schedule="constant"))
    assert {learning_rate(config, step) for step in (1, 50, 300)} == {0.5}


def test_only_matrices_decay():
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
    model[0].weight.requires_grad_(False)
    model.append(nn.Linear(3, 2))
    optimizer = build_optimizer(model, OptimConfig(weight_decay=0.1))
    decay = {g["weight_decay"]: [p.ndim for p in g["params"]] for g in optimizer.param_groups}
    assert decay == {0.1: [2], 0.0: [1, 1, 1, 1]}


def test_metrics_drop_what_will_be_done_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path, 0)
    rows = [{"step": i, "loss": 1 / 3 / i} for i in range(1, 7)]
    for row in rows:
        first.write(row)
    first.close()
    with path.open("a") as file:
        file.write('{"step": 7, "lo')  # killed in the middle of a line
    again = MetricsFile(path, 4)
    again.write({"step": 5, "loss": 0.25})
    again.sync()
    again.close()
    assert read_metrics(path) == [*rows[:4], {"step": 5, "loss": 0.25}]
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4, 5]


def test_metrics_refuse_what_is_no_number(tmp_path):
    with pytest.raises(ValueError):
        MetricsFile(tmp_path / "metrics.jsonl", 0).write({"step": 1, "loss": float("nan")})


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        return True


def show(stream, monkeypatch):
    monkeypatch.setattr("sys.stdout", stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    console = Console(total_steps=4, line_every=2, silent=False)
    console.start(0)
    for step in range(1, 5):
        row = {"step": step, "loss": 1.5, "accuracy": 0.25, "grad_norm": 2.0, "lr": 0.1}
        row |= {"epoch": 0.1, "tokens_per_s": 1234.4, "step_time_s": 0.1}
        console.step(row | ({"val_loss": 1.25} if step == 3 else {}))
    console.say("end")
    console.stop()
    return stream.getvalue()


def test_console_prints_plain_lines_into_files(monkeypatch):
    end = "norm 2.00  lr 1.00e-01  1,234 tokens/s"
    assert show(io.StringIO(), monkeypatch).splitlines() == [
        f"step 2/4  loss 1.5000  accuracy 0.2500  {end}  eta 0:00:00",
        f"step 3/4  loss 1.5000  accuracy 0.2500  val_loss 1.2500  {end}  eta 0:00:00",
        f"step 4/4  loss 1.5000  accuracy 0.2500  {end}",
        "end",
    ]


def test_console_draws_a_bar_on_a_terminal(monkeypatch):
    shown = show(Terminal(), monkeypatch)
    assert "4/4" in shown
    assert "\x1b[" in shown
    assert "val_loss 1.2500" in shown


@pytest.mark.parametrize(
    ("width", "shown", "left_out"), [("70", "norm", "lr "), ("200", "lr ", "…")]
)
def test_the_bar_leaves_out_what_has_no_room(monkeypatch, width, shown, left_out):
    stream = Terminal()
    monkeypatch.setattr("sys.stdout", stream)
    console = Console(total_steps=1000, line_every=2, silent=False)
    console.start(0)
    monkeypatch.setattr(console._progress.console, "_width", int(width))
    row = {"step": 1, "loss": 1.5, "grad_norm": 2.0, "lr": 0.1, "epoch": 0.1, "step_time_s": 0.1}
    text = console._fitting(row | {"tokens_per_s": 12345.0})
    console.stop()
    assert shown in text and left_out not in text and "tokens/s" in text and "loss" in text


def test_arguments():
    found = parse(["job.toml", "--nproc", "3", "--train.steps=5", "--mesh.shard", "-1"])
    assert (found.config_file, found.nproc, found.port) == ("job.toml", 3, 0)
    assert found.overrides == (("train.steps", "5"), ("mesh.shard", "-1"))
    assert found.for_ranks == ("job.toml", "--train.steps=5", "--mesh.shard=-1")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["a.toml", "b.toml"], "b.toml: a second configuration file"),
        (["--train.steps"], "--train.steps: needs a value"),
        (["--train.steps", "--nproc", "2"], "--train.steps: needs a value"),
        (["-x"], "-x: unknown option"),
        (["--nproc", "0"], "--nproc: expected a whole number from 1"),
        (["--nproc", "two"], "found 'two'"),
        (["--port", "70000"], "--port: expected a whole number from 0 to 65535"),
    ],
)
def test_wrong_arguments(words, expected):
    with pytest.raises(ConfigError) as caught:
        parse(words)
    assert expected in str(caught.value)
