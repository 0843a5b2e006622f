"""What cannot be trained on is one line that says where it stands and what to do; exit code 2, and
nothing is written."""

import errno
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from jobs import StopAfter
from text_kit import CHATML, chat, chats, load, make_tokenizer, write_lines

from shardwise.checkpoint.ranks import Ranks
from shardwise.cli.main import main
from shardwise.errors import ConfigError
from shardwise.train.job import train

GOOD = chat("What?", "That.")
NO_SYSTEM = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"


def roles(*names):
    return {"messages": [{"role": name, "content": "x"} for name in names]}


def lines(*records, **keys):
    """A file of these lines, and keys of the configuration."""
    return {"lines": [GOOD, *records], **keys}


def raw(name, content, **keys):
    return {"file": (name, content), **keys}


# name -> (what is given, what the line has to say)
CASES = {
    "broken JSON": (lines('{"messages": ['), r"data.jsonl:2: is not JSON: .* column \d+"),
    "a list on a line": (lines("[1, 2]"), "data.jsonl:2: expected an object .* found a list"),
    "a line that is no text": (
        raw("data.jsonl", b'{"messages": []}\n{"messages": "\xff\xfe"}\n'),
        "data.jsonl:2: is not text in UTF-8",
    ),
    "wrong field": (lines({"conversation": []}), "no field 'messages'.*messages=conversation"),
    "a near field": (lines({"message": []}), r'data.fields = \["messages=message"\]'),
    "as ShareGPT has it": (
        lines({"conversations": [{"from": "human", "value": "x"}]}),
        r'data.fields = \["messages=conversations", "role=from", "content=value"\]',
    ),
    "messages as ShareGPT has them": (
        lines({"messages": [{"from": "human", "value": "x"}]}),
        r'data.fields = \["role=from", "content=value"\]',
    ),
    "instructions as chats": (
        lines({"instruction": "x", "input": "", "output": "y"}),
        "no field 'messages'; it has instruction, input, output: set data.format = 'instruction'",
    ),
    "chats as texts": (
        raw("data.jsonl", b'{"messages": []}', data__format="text"),
        "no field 'text'; it has messages: set data.format = 'chat'",
    ),
    "half of a character": (
        lines('{"messages": [{"role": "user", "content": "\\ud83d"}]}'),
        r"data.jsonl:2: holds \\ud83d, half of a character",
    ),
    "a number of 5,000 digits": (
        lines('{"messages": ' + "9" * 5000 + "}"),
        "data.jsonl:2: holds a number of too many digits",
    ),
    "JSON that is nested deep": (
        raw("data.json", b"[" * 200_000),
        "data.json:1: is nested too deep",
    ),
    "all alike": (lines(*[GOOD] * 30), "31 samples that are all equal cannot be cut"),
    "no role": (
        lines({"messages": [{"from": "user", "content": "x"}]}),
        "message 1 has no field 'role'",
    ),
    "no content": (lines({"messages": [{"role": "user", "value": "x"}]}), "no field 'content'"),
    "unknown role": (lines(roles("user", "robot")), "message 2 has the role 'robot'"),
    "messages that are no list": (lines({"messages": "Hi"}), "'messages' is not a list"),
    "messages that are texts": (lines({"messages": ["Hi", "Ho"]}), "'messages' is not a list"),
    "no messages": (lines({"messages": []}), "data.jsonl:2: has no messages"),
    "two questions": (lines(roles("user", "user", "assistant")), "message 2 is of the user;"),
    "answer first": (lines(roles("assistant", "user")), "message 1 is of the assistant;"),
    "late system": (lines(roles("user", "system", "assistant")), "message 2 is of the system"),
    "no answer": (lines(roles("user")), "there is no answer to train on"),
    "only a system": (lines(roles("system")), "there is no answer to train on"),
    "empty answer": (lines(chat("Hi", " ")), r"the answer \(message 2\) is empty; mend"),
    "empty question": (lines(chat("", "Hi")), r"the text of the user \(message 1\) is empty"),
    "content that is a number": (lines(chat("Hi", 7)), "the content of message 2 is not a text"),
    "an image": (
        lines(chat([{"type": "image", "url": "x"}], "A cat.")),
        "the content of message 1 is not a text",
    ),
    "template refuses": (
        lines(chat("Hi", "Ho", system="Be kind"), template=NO_SYSTEM + CHATML),
        "refuses it: no system.*merge",
    ),
    "template is no jinja": (lines(template="{% for %}"), "data.chat_template: line 1: "),
    "template cannot tell": (
        lines(template="{% for m in messages %}{{ m['role'] + m['content'] }}{% endfor %}"),
        "data.jsonl:1: the chat template does not tell .*generation",
    ),
    "no template": (lines(template=None), "has no chat template; give one"),
    "template file is missing": (lines(data__chat_template="no.jinja"), "no.jinja: no such file"),
    "no tokenizer directory": (lines(data__tokenizer="nowhere"), "nowhere: no such directory"),
    "directory without a tokenizer": (lines(data__tokenizer="."), "has no tokenizer"),
    "no tokenizer named": (lines(data__tokenizer=""), "name the directory of the model"),
    "too long": (
        lines(chat("x" * 70, "y"), data__overlong="refuse"),
        "data.jsonl:2: has 77 tokens, data.seq_len is 64",
    ),
    "all too long": (
        lines(chat("x" * 70, "y" * 9), data__seq_len=8),
        "no sample is left of 2: .* have no trained token",
    ),
    "one sample": (lines(), "a single sample cannot be cut"),
    "no file": (raw("data.jsonl", b"{}", data__source="none.jsonl"), "none.jsonl: no such file"),
    "empty file": (raw("data.jsonl", b""), "data.jsonl: is empty"),
    "only empty lines": (raw("data.jsonl", b"\n\n"), "data.jsonl: there is no record in it"),
    "text file of chats": (raw("data.txt", b"Hi"), "a chat needs fields; use .jsonl"),
    "damaged parquet": (raw("data.parquet", b"PAR1"), "data.parquet: cannot be read"),
    "csv with too many cells": (
        raw("data.csv", b"instruction,output\na,b\na,b,c,d\n", data__format="instruction"),
        "data.csv: cannot be read: .* line 3",
    ),
    "csv without the field": (
        raw("data.csv", b"question,output\na,b\n", data__format="instruction"),
        r"no field 'instruction'; it has question, output: .*instruction=question",
    ),
    "instruction without answer": (
        raw("data.jsonl", b'{"instruction": "a", "output": null}', data__format="instruction"),
        r"data.jsonl:1: the answer \('output'\) is empty",
    ),
    "text that is null": (
        raw("data.jsonl", b'{"text": null}', data__format="text"),
        "data.jsonl:1: 'text' is empty",
    ),
    "fields of another format": (lines(data__fields=["output=x"]), "takes messages=NAME"),
    "split chats": (lines(data__overlong="split"), "split is for data.format = 'text'"),
    "the built-in decoder": (lines(model__kind="decoder"), "reads tokens"),
    "the default source": (lines(data__source="stdlib"), "name the files"),
    "a key of chats with texts": (
        raw("data.txt", b"Hi", data__format="text", data__system="merge"),
        "data.system: has no effect: data.format is 'text'",
    ),
}


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def options(tmp_path, given):
    """What `shardwise data` is called with."""
    given = dict(given)
    template = given.pop("template", CHATML)
    tokenizer = make_tokenizer(tmp_path / "tokenizer", template)
    if "lines" in given:
        source = write_lines(tmp_path / "data.jsonl", given.pop("lines"))
    else:
        name, content = given.pop("file")
        source = tmp_path / name
        source.write_bytes(content)
    keys = {
        "model__kind": "models:tiny",
        "data__format": "chat",
        "data__source": str(source),
        "data__tokenizer": str(tokenizer),
        "data__seq_len": 64,
        "run__dir": str(tmp_path / "run"),
    } | given
    if not keys["data__tokenizer"]:
        del keys["data__tokenizer"]
    texts = {k: json.dumps(v) if isinstance(v, list) else str(v) for k, v in keys.items()}
    return [f"--{key.replace('__', '.')}={value}" for key, value in texts.items()]


def files_in(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


@pytest.mark.parametrize("name", CASES)
def test_each_is_one_line_and_nothing_is_written(tmp_path, capfd, name):
    given, text = CASES[name]
    arguments = options(tmp_path, given)
    before = files_in(tmp_path)
    assert main(["data", *arguments]) == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1, said
    assert said.startswith("shardwise data: ")
    assert re.search(text, said), said
    assert files_in(tmp_path) == before


def test_there_are_thirty():
    assert len(CASES) >= 30


def test_bad_records_may_be_skipped_and_are_counted(tmp_path):
    from shardwise.train.data import open_data

    records = [*chats(10), "{broken", roles("user"), {"other": 1}, chat("Hi", "")]
    path = write_lines(tmp_path / "data.jsonl", records)
    data = open_data(load(tmp_path, path, data__invalid="skip").config, None)
    assert "4 skipped (data.invalid)" in data.notes[0]
    path = write_lines(tmp_path / "data.jsonl", records[10:])
    with pytest.raises(ConfigError, match=r"data.jsonl:1: is not JSON.*no record can be used"):
        open_data(load(tmp_path, path, data__invalid="skip").config, None)


MODELS = """
import transformers

def tiny(options):
    sizes = dict(vocab_size=300, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                 num_attention_heads=2, max_position_embeddings=64)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(sizes | options)))
"""


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"vocab_size": 100}, "makes token 2.., but the embedding of the model has 100 rows"),
        ({"max_position_embeddings": 20}, "the longest document has .* set data.seq_len = 20"),
    ],
    ids=["vocabulary larger than the embedding", "sample longer than the context"],
)
def test_what_the_model_has_no_place_for(tmp_path, options, text):
    (tmp_path / "models.py").write_text(MODELS)
    path = write_lines(tmp_path / "data.jsonl", chats(20))
    keys = {f"model__{key}": value for key, value in options.items()}
    loaded = load(tmp_path, path, **keys)
    before = files_in(tmp_path)
    with pytest.raises(ConfigError, match=text):
        train(loaded, Ranks(), torch.device("cpu"), StopAfter(None))
    new = set(files_in(tmp_path)) - set(before)
    assert all(name.startswith("cache/") or "__pycache__" in name for name in new)


def test_train_says_the_same(tmp_path):
    arguments = options(tmp_path, lines("{broken"))
    before = files_in(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "shardwise.cli", "train", "--nproc", "2", *arguments],
        capture_output=True,
        check=False,
        text=True,
        timeout=110,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert done.returncode == 2, done.stderr
    # On a busy machine a rank says that it waits for one that is late.
    (line,) = [line for line in done.stderr.splitlines() if " waited " not in line]
    assert "data.jsonl:2: is not JSON" in line
    assert files_in(tmp_path) == before


@pytest.mark.parametrize("library", ["datasets", "transformers"])
def test_a_missing_extra_is_one_line(tmp_path, capfd, monkeypatch, library):
    arguments = options(tmp_path, lines())
    monkeypatch.setitem(sys.modules, library, None)
    before = files_in(tmp_path)
    assert main(["data", *arguments]) == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert 'pip install "shardwise[hf]"' in said
    assert files_in(tmp_path) == before


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path, capfd, monkeypatch):
    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device", "tokens.bin")

    monkeypatch.setattr(Path, "rename", full)
    assert main(["data", *options(tmp_path, lines(*chats(9)))]) == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert "No space left on device: 'tokens.bin': too little space is left there" in said


def test_weights_that_are_no_numbers_are_named_before_the_first_step(tmp_path):
    from shardwise.train.data import open_data
    from shardwise.train.model import build_model
    from shardwise.train.text.check import check_packing

    (tmp_path / "nan_models.py").write_text(  # a name of its own: modules stay imported
        MODELS.replace("    return ", "    model = ")
        + "    model.model.norm.weight.data.fill_(float('nan'))\n    return model\n"
    )
    path = write_lines(tmp_path / "data.jsonl", chats(30))
    config = load(tmp_path, path, model__kind="nan_models:tiny").config
    data, model = open_data(config, tmp_path), build_model(config, tmp_path)
    with pytest.raises(ConfigError, match=r"model.path: the logits .* are nan or inf before any"):
        check_packing(config, data, model, Ranks(), torch.device("cpu"))
