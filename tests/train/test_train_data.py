"""Data: order, split and samples; nothing read twice, nothing held out trained on."""

import os
import re
import time

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from search import TIMES
from shardwise.errors import ConfigError
from shardwise.train import cache as cache_module
from shardwise.train.config import (
    Config,
    DataConfig,
    DecoderConfig,
    RunConfig,
    TrainConfig,
)
from shardwise.train.corpus import open_corpus
from shardwise.train.data import DatasetSamples, TokenSamples, open_data
from shardwise.train.order import SampleOrder


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def open_text(source, **options):
    options = {"held_out": 0.1, "token_dtype": "uint16", "fallback_dir": None} | options
    return open_corpus(source, **options)


# ---- order


@given(
    num_samples=st.integers(1, 500),
    seed=st.integers(0, 2**64 - 1),
    epoch=st.integers(0, 2**20),
)
def test_an_epoch_reads_each_sample_once(num_samples, seed, epoch):
    order = SampleOrder(num_samples, seed)
    read = order.indices(epoch * num_samples, num_samples)
    assert sorted(read) == list(range(num_samples))


@given(
    num_samples=st.integers(1, 300),
    world=st.integers(1, 17),
    micro=st.integers(1, 4),
    num_micro=st.integers(1, 3),
)
def test_world_size_changes_who_reads_but_not_what(num_samples, world, micro, num_micro):
    """The ranks of any world read the same samples in a step, and each once per epoch."""
    order = SampleOrder(num_samples, seed=3)
    share = micro * num_micro
    batch = world * share
    for step in range(2):
        alone = order.indices(step * batch, batch)
        shared = [
            order.indices(step * batch + rank * share + i * micro, micro)
            for rank in range(world)
            for i in range(num_micro)
        ]
        assert np.array_equal(np.concatenate(shared), alone)
    stream = order.indices(0, 2 * batch)
    for first in range(0, len(stream) - num_samples + 1, num_samples):
        assert len(set(stream[first : first + num_samples])) == num_samples


def test_order_depends_on_seed_and_epoch_and_mixes():
    n = 10_000
    first, again = SampleOrder(n, 1).indices(0, n), SampleOrder(n, 1).indices(0, n)
    assert np.array_equal(first, again)
    for other in (SampleOrder(n, 2).indices(0, n), SampleOrder(n, 1).indices(n, n)):
        assert (first == other).mean() < 0.01
    assert abs(np.corrcoef(first, np.arange(n))[0, 1]) < 0.05
    assert (np.diff(first) == 1).mean() < 0.01


def test_huge_data_needs_no_memory():
    order = SampleOrder(10**12, 0)
    assert len(set(order.indices(10**12 - 500, 1000).tolist())) > 990


# ---- text


def write_files(folder, count, size=400):
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(count):
        (folder / f"{i:03}.txt").write_text(f"<{i:03}>" + chr(97 + i % 26) * (size - 5))
    return str(folder)


def documents(arrays):
    return set(re.findall(rb"<\d+>", b"".join(a.tobytes() for a in arrays)))


def test_whole_files_are_held_out(tmp_path):
    found = open_text(write_files(tmp_path / "text", 60))
    train, held_out = documents(found.train), documents(found.held_out)
    assert len(train | held_out) == 60
    assert not train & held_out
    assert 5 <= len(held_out) <= 7
    assert found.unit == "byte"


def test_few_files_are_cut_at_the_end(tmp_path):
    path = tmp_path / "one.txt"
    path.write_bytes(bytes(range(1, 201)) * 5)
    found = open_text(str(path))
    joined = found.train[0].tobytes() + found.held_out[0].tobytes()
    assert joined == path.read_bytes() + b"\0"
    assert len(found.held_out[0]) == 100


def test_copies_are_read_once(tmp_path):
    folder = write_files(tmp_path / "text", 30)
    before = open_text(folder)
    for i in range(30):
        (tmp_path / "text" / f"copy{i}.txt").write_bytes(
            (tmp_path / "text" / f"{i:03}.txt").read_bytes()
        )
    after = open_text(folder)
    assert sum(map(len, after.train + after.held_out)) == sum(
        map(len, before.train + before.held_out)
    )
    assert not documents(after.train) & documents(after.held_out)


def test_cache_follows_the_files(tmp_path):
    folder = tmp_path / "text"
    first = open_text(write_files(folder, 3))
    assert open_text(str(folder)).fingerprint == first.fingerprint
    (folder / "000.txt").write_text("changed")
    assert open_text(str(folder)).fingerprint != first.fingerprint
    assert not list((tmp_path / "cache/shardwise/data").glob("*.tmp*"))


def test_damaged_cache_is_built_again(tmp_path):
    folder = write_files(tmp_path / "text", 3)
    first = open_text(folder)
    [cached] = (tmp_path / "cache/shardwise/data").glob("*/train.bin")
    whole = cached.read_bytes()
    cached.write_bytes(whole[:10])
    assert open_text(folder).fingerprint == first.fingerprint
    assert cached.read_bytes() == whole


def test_old_and_too_large_caches_are_removed(tmp_path, monkeypatch):
    root = tmp_path / "cache/shardwise/data"
    for name in "abcd":
        open_text(write_files(tmp_path / name, 3))
    old, large, kept, last = sorted(root.glob("*/"), key=lambda p: p.stat().st_mtime_ns)
    (root / "notes").mkdir()  # not ours
    left = root / f"{old.name}.x1y2"
    left.mkdir()
    day = 86400
    for path, days in ((old, 31), (large, 20), (kept, 2), (left, 2), (root / "notes", 99)):
        os.utime(path, (time.time() - days * day,) * 2)
    size = sum(f.stat().st_size for f in kept.iterdir())
    monkeypatch.setattr(cache_module, "_KEPT_BYTES", 2 * size + size // 2)
    open_text(write_files(tmp_path / "e", 3))
    assert kept.exists()
    assert last.exists()
    assert (root / "notes").exists()
    assert not old.exists()
    assert not large.exists()
    assert not left.exists()


def test_cache_goes_to_the_run_directory_where_home_cannot_be_written(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_module.os, "access", lambda *_: False)
    open_text(write_files(tmp_path / "text", 3), fallback_dir=tmp_path / "run/cache")
    assert list((tmp_path / "run/cache").glob("*/train.bin"))


def test_binary_and_hidden_files_of_a_folder_are_left_out(tmp_path):
    folder = tmp_path / "text"
    write_files(folder, 3)
    (folder / "picture.png").write_bytes(b"\x89PNG\0\0")
    (folder / ".hidden").write_text("secret")
    (folder / ".git").mkdir()
    (folder / ".git/config").write_text("secret")
    content = b"".join(a.tobytes() for a in (*open_text(str(folder)).train,))
    assert b"secret" not in content
    assert b"PNG" not in content


# ---- token files


@settings(max_examples=30 * TIMES)
@given(
    sizes=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    seq_len=st.integers(1, 9),
    held_out=st.floats(0.05, 0.9),
)
def test_token_files_split_without_overlap(tmp_path_factory, sizes, seq_len, held_out):
    folder = tmp_path_factory.mktemp("tokens")
    values = np.arange(sum(sizes), dtype=np.uint16)
    for i, part in enumerate(np.split(values, np.cumsum(sizes)[:-1])):
        np.save(folder / f"{i}.npy", part)
    found = open_text(str(folder), held_out=held_out)
    train = [t for a in found.train for t in a.tolist()]
    kept = [t for a in found.held_out for t in a.tolist()]
    assert train + kept == values.tolist()
    assert kept
    samples = TokenSamples(found.train, seq_len, vocab_size=None)
    assert len(samples) == sum(max(0, (len(a) - 1) // seq_len) for a in found.train)
    if len(samples):
        batch = samples.batch(np.arange(len(samples)))
        assert batch.shape == (len(samples), seq_len + 1)
        assert (batch.diff(dim=1) == 1).all()  # consecutive tokens of one file
        targets = batch[:, 1:].flatten().tolist()
        assert len(set(targets)) == len(targets)
        assert not set(targets) & set(kept)


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_bin_files(tmp_path, dtype):
    tokens = np.arange(200).astype(dtype)
    tokens.tofile(tmp_path / "t.bin")
    found = open_text(str(tmp_path / "t.bin"), token_dtype=dtype)
    assert np.concatenate(found.train + found.held_out).tolist() == tokens.tolist()
    assert found.unit == "token"


# ---- samples and errors


def config_for(tmp_path, **data):
    data = {"seq_len": 16, "held_out": 0.1} | data
    return Config(
        run=RunConfig(dir=str(tmp_path / "run")),
        data=DataConfig(**data),
        train=TrainConfig(global_batch=4, micro_batch=1),
    )


def test_byte_samples_are_the_text(tmp_path):
    path = tmp_path / "one.txt"
    content = bytes(i % 200 + 1 for i in range(2000))
    path.write_bytes(content)
    data = open_data(config_for(tmp_path, source=str(path)), None)
    batch = data.train.batch(np.array([0, 3]))
    assert batch.dtype is torch.int64
    assert bytes(batch[1].tolist()) == content[3 * 16 : 3 * 16 + 17]
    assert data.unit == "byte"
    assert data.held_out is not None
    assert len(data.held_out) == (200 - 1) // 16


def refused(tmp_path, **data):
    with pytest.raises(ConfigError) as caught:
        open_data(config_for(tmp_path, **data), None)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()
    return str(caught.value)


def test_unusable_data_is_refused(tmp_path):
    assert "no such file" in refused(tmp_path, source=str(tmp_path / "none.txt"))
    (tmp_path / "folder").mkdir()
    assert "no text files in directory" in refused(tmp_path, source=str(tmp_path / "folder"))
    (tmp_path / "empty.txt").touch()
    assert "are empty" in refused(tmp_path, source=str(tmp_path / "empty.txt"))
    (tmp_path / "short.txt").write_text("short")
    assert "fewer than" in refused(tmp_path, source=str(tmp_path / "short.txt"))
    (tmp_path / "binary.dat").write_bytes(b"\0\1\2")
    assert "neither text nor" in refused(tmp_path, source=str(tmp_path / "binary.dat"))
    (tmp_path / "empty.bin").touch()
    assert "is empty" in refused(tmp_path, source=str(tmp_path / "empty.bin"))
    (tmp_path / "odd.bin").write_bytes(b"abc")
    assert "no multiple of 2" in refused(tmp_path, source=str(tmp_path / "odd.bin"))
    (tmp_path / "bad.npy").write_bytes(b"abc")
    assert "as a .npy array" in refused(tmp_path, source=str(tmp_path / "bad.npy"))
    np.save(tmp_path / "float.npy", np.ones(9))
    assert "one dimension of integers" in refused(tmp_path, source=str(tmp_path / "float.npy"))
    mixed = (str(tmp_path / "short.txt"), str(tmp_path / "odd.bin"))
    assert "mixes token files with text" in refused(tmp_path, source=mixed)


def test_held_out_shorter_than_a_sequence_is_refused(tmp_path):
    (tmp_path / "a.txt").write_text("abcdefgh" * 100)
    text = refused(tmp_path, source=str(tmp_path / "a.txt"), held_out=0.001)
    assert "data.held_out: 0.001 of the data is shorter than one sequence" in text


def test_token_beyond_the_vocabulary_is_refused(tmp_path):
    np.save(tmp_path / "t.npy", np.full(500, 300, dtype=np.uint16))
    config = config_for(tmp_path, source=str(tmp_path / "t.npy"))
    data = open_data(config, None)
    with pytest.raises(ConfigError, match="holds token 300, but the model knows tokens below 256"):
        data.train.batch(np.array([0]))
    assert isinstance(config.model, DecoderConfig)


def test_user_datasets(tmp_path):
    (tmp_path / "my_datasets.py").write_text(
        "def make(options):\n"
        "    assert options == {'source': 'my_datasets:make'}\n"
        "    return [(i, i * 0.5) for i in range(10)], None\n"
        "def wrong(options):\n    return [1, 2]\n"
    )
    config = config_for(tmp_path, source="my_datasets:make")
    data = open_data(config, tmp_path)
    numbers, halves = data.train.batch(np.array([3, 4]))
    assert numbers.tolist() == [3, 4]
    assert halves.tolist() == [1.5, 2.0]
    assert (data.unit, data.held_out) == ("sample", None)
    with pytest.raises(ConfigError, match="must return two datasets"):
        open_data(config_for(tmp_path, source="my_datasets:wrong"), tmp_path)
    with pytest.raises(ConfigError, match="has no function 'nothing'"):
        open_data(config_for(tmp_path, source="my_datasets:nothing"), tmp_path)
    with pytest.raises(ConfigError, match="no module 'no_such_module'"):
        open_data(config_for(tmp_path, source="no_such_module:make"), tmp_path)


def test_tokens_that_have_a_loss_are_counted_without_reading():
    tokens = TokenSamples((np.arange(100, dtype=np.uint16),), seq_len=8, vocab_size=None)
    assert tokens.trained_tokens(np.array([0, 3])) == tokens.batch(np.array([0, 3]))[:, 1:].numel()
    assert DatasetSamples([1, 2, 3]).trained_tokens(np.array([0, 2])) is None
