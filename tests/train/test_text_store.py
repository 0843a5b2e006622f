"""Tokenised once: keyed by content, tokenizer and settings; by one process while others wait; what
is held out, cut and left out."""

import json
import multiprocessing
import os
import shutil
import time

import numpy as np
import pytest
from text_kit import MARKED, chat, chats, load, make_tokenizer, write_lines

from kills import killed_at_each_step
from shardwise.errors import ConfigError
from shardwise.train.cache import INFO, is_sound
from shardwise.train.data import open_data
from shardwise.train.text import store as store_module


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


ONE = {"train__global_batch": 1, "train__micro_batch": 1}  # for few rows


def folders(tmp_path):
    root = tmp_path / "cache/shardwise/data"
    return sorted(p.name for p in root.iterdir() if p.is_dir())


def test_the_key_is_content_tokenizer_and_settings(tmp_path, capfd):
    path = write_lines(tmp_path / "a.jsonl", chats(20))
    first = open_data(load(tmp_path, path).config, None)
    assert "tokenising a.jsonl" in capfd.readouterr().out
    moved = shutil.copy(path, tmp_path / "b.jsonl")
    os.utime(moved, (1, 1))
    again = open_data(load(tmp_path, moved, run__seed=5, train__steps=7).config, None)
    assert again.fingerprint == first.fingerprint
    assert "tokenising" not in capfd.readouterr().out
    assert len(folders(tmp_path)) == 1

    write_lines(path, [*chats(19), chat("new", "one")])
    prints = {first.fingerprint, open_data(load(tmp_path, path).config, None).fingerprint}
    for keys in (
        {"data__seq_len": 48},
        {"data__packing": False},
        {"data__held_out": 0.3},
    ):
        prints.add(open_data(load(tmp_path, path, **keys).config, None).fingerprint)
    assert len(prints) == 5
    assert len(folders(tmp_path)) == 5
    other = make_tokenizer(tmp_path / "other", MARKED)
    open_data(load(tmp_path, path, data__tokenizer=other).config, None)
    template = tmp_path / "template.jinja"
    template.write_text(MARKED.replace("<u>", "<t>"))
    open_data(load(tmp_path, path, data__chat_template=template).config, None)
    assert len(folders(tmp_path)) == 7


def test_what_is_cached_needs_no_tokenizer(tmp_path, monkeypatch):
    """The ranks that did not build it map it, and load nothing."""
    config = load(tmp_path, write_lines(tmp_path / "a.jsonl", chats(20))).config
    first = open_data(config, None)

    def fail(*_args, **_options):
        raise AssertionError

    monkeypatch.setattr(store_module, "load_tokenizer", fail)
    again = open_data(config, None)
    indices = np.arange(len(first.train))
    for name, tensor in first.train.batch(indices).items():
        assert tensor.equal(again.train.batch(indices)[name])


def test_a_damaged_cache_is_built_again(tmp_path):
    config = load(tmp_path, write_lines(tmp_path / "a.jsonl", chats(20))).config
    first = open_data(config, None)
    (tokens,) = (tmp_path / "cache").rglob("tokens.bin")
    tokens.write_bytes(b"short")
    assert open_data(config, None).fingerprint == first.fingerprint
    assert tokens.stat().st_size > 5
    written = tokens.read_bytes()
    tokens.write_bytes(written[:40] + bytes([written[40] ^ 1]) + written[41:])  # of the same size
    open_data(config, None)
    assert tokens.read_bytes() == written


def test_a_kill_at_any_step_leaves_nothing_half_written(tmp_path):
    """What has the name of a cache is whole, and the next start has the bytes of an undisturbed
    one."""
    config = load(tmp_path, write_lines(tmp_path / "a.jsonl", chats(20))).config
    open_data(config, None)  # what is imported once, and what is to be read
    root = tmp_path / "cache/shardwise/data"
    (name,) = folders(tmp_path)
    expected = {p.name: p.read_bytes() for p in (root / name).iterdir() if p.name != INFO}
    shutil.rmtree(root)
    seen = []
    for _ in killed_at_each_step(lambda: open_data(config, None), root):
        whole = (root / name).exists()
        seen.append(whole)
        assert whole == is_sound(root / name)
        if not whole:  # else this would be the end of it
            shutil.rmtree(root, ignore_errors=True)
    assert len(seen) > 10
    shutil.rmtree(root / name)
    damaged = root / name
    damaged.mkdir()
    (damaged / "tokens.bin").write_bytes(b"half")
    for _ in killed_at_each_step(lambda: open_data(config, None), root):
        open_data(config, None)
        found = {p.name: p.read_bytes() for p in damaged.iterdir() if p.name != INFO}
        assert found == expected
        (damaged / "tokens.bin").write_bytes(b"half")


def _open(config, gate, out):
    gate.wait()
    out.put((open_data(config, None).fingerprint, time.monotonic()))


def test_one_process_tokenises_and_the_others_wait(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    config = load(tmp_path, write_lines(tmp_path / "a.jsonl", chats(3000))).config
    context = multiprocessing.get_context("fork")
    gate, out = context.Barrier(3), context.Queue()
    workers = [context.Process(target=_open, args=(config, gate, out)) for _ in range(3)]
    for worker in workers:
        worker.start()
    found = {out.get(timeout=60)[0] for _ in workers}
    for worker in workers:
        worker.join(60)
    said = capfd.readouterr().out
    assert len(found) == 1
    assert said.count("tokenising a.jsonl") == 1
    assert said.count("another process tokenises it; waiting for that") == 2


def _fail(config, gate, out):
    gate.wait()
    try:
        open_data(config, None)
    except ConfigError as error:
        out.put(str(error))


def test_those_who_wait_share_the_mistake(tmp_path, capfd):
    """Nobody tokenises everything again to come to the same line."""
    path = write_lines(tmp_path / "a.jsonl", [*chats(3000), "{broken"])
    config = load(tmp_path, path).config
    context = multiprocessing.get_context("fork")
    gate, out = context.Barrier(3), context.Queue()
    workers = [context.Process(target=_fail, args=(config, gate, out)) for _ in range(3)]
    for worker in workers:
        worker.start()
    (text,) = {out.get(timeout=60) for _ in workers}
    for worker in workers:
        worker.join(60)
    assert "a.jsonl:3001: is not JSON" in text
    assert capfd.readouterr().out.count("tokenising a.jsonl") == 1
    assert not [p for p in (tmp_path / "cache").rglob("*") if p.is_file()]
    write_lines(path, chats(3000))
    assert len(open_data(load(tmp_path, path).config, None).train)


def test_held_out_are_whole_documents_and_all_that_equal_them(tmp_path):
    """A copy of what is held out must not be trained on."""
    records = [*chats(30), *chats(30)]
    path = write_lines(tmp_path / "a.jsonl", records)
    data = open_data(load(tmp_path, path, data__held_out=0.2, data__seq_len=128).config, None)

    def documents(part):
        return [t.tobytes() for row in range(len(part)) for t, _ in part.documents(row)]

    train, held_out = documents(data.train), documents(data.held_out)
    assert len(train) + len(held_out) == 60
    assert 12 <= len(held_out) <= 14
    assert not set(train) & set(held_out)


def test_nothing_is_held_out_where_nobody_wants_it(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", chats(20))
    data = open_data(load(tmp_path, path, data__held_out=0).config, None)
    assert data.held_out is None
    assert "(0 held out)" in data.notes[0]


@pytest.mark.parametrize(
    ("how", "said", "longest"),
    [
        ("truncate", "1 truncated to 64 tokens", 64),
        ("auto", "1 truncated to 64 tokens", 64),
        ("drop", "1 dropped, longer than 64 tokens", 40),
    ],
)
def test_overlong_chats(tmp_path, how, said, longest):
    records = [*chats(1), chat("q", "a"), chat("x" * 20, "long " * 40), chat("y" * 90, "lost")]
    if how == "drop":
        records = records[:3]
    path = write_lines(tmp_path / "a.jsonl", [*records, *(chat(f"n{i}", "m") for i in range(9))])
    data = open_data(load(tmp_path, path, data__overlong=how, **ONE).config, None)
    assert (said if how == "drop" else said.replace("1 ", "2 ")) in data.notes[0]
    assert data.longest <= longest
    if how != "drop":
        assert "1 dropped, without a trained token within 64" in data.notes[0]


def test_long_texts_are_split_and_every_token_is_trained_once(tmp_path):
    text = "".join(chr(97 + i % 26) for i in range(1000))
    (tmp_path / "a.txt").write_text(text)
    keys = {"data__format": "text", "data__held_out": 0.25, "data__packing": False}
    loaded = load(tmp_path, tmp_path / "a.txt", **keys)
    data = open_data(loaded.config, None)
    assert "1 split into pieces of at most 64 tokens" in data.notes[0]
    parts = [data.train, data.held_out]
    assert sum(p.trained_tokens(np.arange(len(p))) for p in parts) == 1000  # with the end token
    assert len(data.held_out) == 4
    # The end of the text is held out: as one piece follows the other, it shares one token.
    held = np.concatenate([t[1:] for r in range(4) for t, _ in data.held_out.documents(r)])
    assert len(held) == 1000 - 63 * 12


def test_instructions_become_chats(tmp_path):
    rows = [{"instruction": "Add", "input": "1 and 2", "output": "3"}]
    rows += [{"instruction": f"Say {i}", "input": "", "output": str(i)} for i in range(9)]
    path = write_lines(tmp_path / "a.jsonl", rows)
    told = open_data(load(tmp_path, path, data__format="instruction", **ONE).config, None)
    same = [chat("Add\n\n1 and 2", "3"), *(chat(f"Say {i}", str(i)) for i in range(9))]
    path = write_lines(tmp_path / "b.jsonl", same)
    assert told.fingerprint == open_data(load(tmp_path, path, **ONE).config, None).fingerprint


def test_names_of_fields_and_roles_of_others(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", chats(20))
    same = [
        {
            "conversations": [
                {"from": {"user": "human", "assistant": "gpt"}[m["role"]], "value": m["content"]}
                for m in record["messages"]
            ]
        }
        for record in chats(20)
    ]
    other = write_lines(tmp_path / "b.jsonl", same)
    fields = ["messages=conversations", "role=from", "content=value"]
    expected = open_data(load(tmp_path, path).config, None).fingerprint
    found = open_data(load(tmp_path, other, data__fields=fields).config, None).fingerprint
    assert found == expected


@pytest.mark.parametrize("how", ["merge", "drop"])
def test_the_message_of_the_system(tmp_path, how):
    path = write_lines(tmp_path / "a.jsonl", [chat("q", "a", system="s"), chat("b", "c")])
    first = {"merge": "s\n\nq", "drop": "q"}[how]
    same = write_lines(tmp_path / "b.jsonl", [chat(first, "a"), chat("b", "c")])
    found = open_data(load(tmp_path, path, data__system=how, **ONE).config, None)
    expected = open_data(load(tmp_path, same, **ONE).config, None)
    assert found.fingerprint == expected.fingerprint


def test_fewer_rows_than_a_batch_is_one_line(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", chats(20))
    with pytest.raises(ConfigError, match=r"the training part has \d+ samples, fewer than"):
        open_data(load(tmp_path, path, train__global_batch=64).config, None)


def test_shardwise_data_shows_it(tmp_path, capsys, monkeypatch):
    from shardwise.cli.main import main

    path = write_lines(tmp_path / "a.jsonl", chats(50))
    loaded = load(tmp_path, path)
    file = tmp_path / "job.toml"
    file.write_text(
        f'[model]\nkind = "models:tiny"\n[data]\nformat = "chat"\n'
        f"source = {json.dumps(str(path))}\n"
        f"tokenizer = {json.dumps(loaded.config.data.tokenizer)}\nseq_len = 64\n"
        "[train]\nglobal_batch = 4\nmicro_batch = 2\n"
    )
    assert main(["data", str(file), "--data.held_out", "0.1"]) == 0
    said = capsys.readouterr().out
    assert "50 records" in said
    assert "8 truncated to 64 tokens" in said
    assert "of the tokens are trained" in said
    assert said.count("sample ") == 3
    assert "<a>«it is " in said
    assert "<e>»" in said
    assert not (tmp_path / "run").exists()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # no folder for a cache
    assert main(["data", str(file), f"--run.dir={tmp_path / 'run'}"]) == 0
    said = capsys.readouterr().out.splitlines()[0]
    assert "file/shardwise/data cannot be used (Not a directory)" in said
    assert f"the cache is {tmp_path / 'run/cache'}" in said
    assert main(["data", str(file), "--nproc", "2"]) == 2
    assert main(["data"]) == 0
