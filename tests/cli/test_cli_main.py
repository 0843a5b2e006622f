"""The command line without a job: help, version, mistakes; one line on stderr, nothing written."""

import os
import subprocess
import sys

import pytest

from shardwise.cli import main


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], ["train", "--help"], ["train", "-h"], ["import-config", "--help"]],
)
def test_help_needs_neither_torch_nor_numpy(arguments):
    """Which is what keeps it fast: each costs more than all the rest."""
    code = (
        "import sys; from shardwise.cli import main; code = main(sys.argv[1:]); "
        "found = {'torch', 'numpy', 'matplotlib'} & set(sys.modules); assert not found, found; "
        "sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
    assert not done.stderr


def test_help_shows_every_key(capsys):
    from shardwise.train.config import Config
    from shardwise.train.config_file import config_as_dict

    assert main(["train", "--help"]) == 0
    text = capsys.readouterr().out
    for section, keys in config_as_dict(Config()).items():
        for key in keys:
            assert f"--{section}.{key} " in text
    assert "--nproc N" in text
    # As people type them, and as the documents have them.
    assert "--max-restarts N" in text
    assert "--model.tie_embeddings {true,false}" in text
    assert not any(word in text for word in ("True", "False", "max_restarts", "min_ranks"))


def test_help_has_whole_lines_and_no_words_of_python(capsys):
    """tyro keeps the breaks of texts of several lines, and shows None where nothing is set."""
    import ast
    import inspect

    from shardwise.train import config

    assert main(["train", "--help"]) == 0
    assert "None" not in capsys.readouterr().out
    for section in ast.parse(inspect.getsource(config)).body:
        if isinstance(section, ast.ClassDef) and section.name.endswith("Config"):
            texts = [n.value for n in ast.walk(section) if isinstance(n, ast.Expr)]
            keys = [n.value for n in texts if isinstance(n, ast.Constant)]
            own = ast.get_docstring(section, clean=False)
            assert not [text for text in keys if "\n" in str(text) and text != own]


@pytest.mark.parametrize("arguments", [["help"], ["checkpoint", "--help"], ["checkpoint"]])
def test_help_is_there_where_people_look_for_it(arguments, capsys):
    assert main(arguments) == 0
    shown = capsys.readouterr()
    assert "usage: shardwise" in shown.out
    assert not shown.err


def test_help_of_the_command_lists_commands_that_exist(capsys):
    assert main([]) == 0
    text = capsys.readouterr().out
    assert "train" in text and "plan" in text


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["trainn"], "shardwise: trainn: unknown command; did you mean train?"),
        (["--verbose"], "shardwise: --verbose: unknown command"),
        (["train", "none.toml"], "shardwise train: none.toml: no such file"),
        (["train", "--nporc", "2"], "--nporc: unknown option; did you mean --nproc?"),
        (["train", "--steps", "2"], "--steps: unknown key; did you mean train.steps?"),
        (["explain", "--jsn"], "--jsn: unknown option; did you mean --json?"),
        (["verify", "a.toml", "b.toml"], "b.toml: one argument too many"),
        (["checkpoint", "lss", "runs"], "checkpoint: lss: unknown command; did you mean ls?"),
        (["checkpoint", "zip"], "zip: unknown command; there are: ls, verify, diff, export"),
        (["checkpoint", "ls"], "the following arguments are required: PATH"),
        (["checkpoint", "ls", "--jsno", "x"], "--jsno: unknown option; did you mean --json?"),
        (["checkpoint", "diff", "a", "b", "c"], "c: one argument too many"),
        (["train", "--train.stepz", "3"], "--train.stepz: unknown key; did you mean train.steps?"),
        (["train", "--train.steps", "x"], "--train.steps: expected a whole number"),
        (
            ["train", "--nproc", "3", "--train.global_batch", "32"],
            "32 is not a multiple of 3 ranks",
        ),
        (["train", "--nproc", "2", "--mesh.replicate", "4"], "4 replicas cannot share 2 ranks"),
        (["train", "--run.dir", "file/run"], "run.dir: "),
        (["train", "--port", "{port}"], "--port: {port} cannot be used"),
    ],
)
def test_mistakes(arguments, expected, tmp_path, monkeypatch, capsys):
    import socket

    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        assert main([a.replace("{port}", port) for a in arguments]) == 2
    shown = capsys.readouterr()
    assert expected.replace("{port}", port) in shown.err
    assert shown.err.count("\n") == 1
    assert not shown.out
    assert os.listdir(tmp_path) == ["file"]


def test_a_closed_pipe_is_no_traceback():
    done = subprocess.run(
        f"{sys.executable} -m shardwise.cli train --help | head -1",
        shell=True,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "usage: shardwise train" in done.stdout
    assert not done.stderr
