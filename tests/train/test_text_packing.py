"""First fit, and what batches of packed rows hold."""

import hypothesis.strategies as st
import numpy as np
from hypothesis import given
from text_kit import chats, load, write_lines

from shardwise.train.data import open_data
from shardwise.train.text.packing import first_fit, flat
from shardwise.train.text.samples import as_batch


def naive(lengths, room):
    rows, free = [], []
    for position, length in enumerate(lengths):
        at = next((i for i, left in enumerate(free) if length <= left), len(rows))
        if at == len(rows):
            rows.append([])
            free.append(room)
        rows[at].append(position)
        free[at] -= length
    return rows


@given(lengths=st.lists(st.integers(1, 40), max_size=80), more=st.integers(0, 40))
def test_first_fit_is_first_fit(lengths, more):
    room = max(lengths, default=1) + more
    assert first_fit(lengths, room) == naive(lengths, room)


def test_rows_as_arrays():
    documents, ends = flat([[2, 0], [1]])
    assert documents.tolist() == [2, 0, 1]
    assert ends.tolist() == [2, 3]


def test_a_batch_has_borders_and_padding_of_its_own():
    def document(*tokens):
        labels = np.array(tokens)
        labels[0] = -100
        return np.array(tokens), labels

    batch = as_batch([[document(5, 6, 7), document(8, 9)], [document(4, 3)]], pad=1, seq_len=6)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9, 1], [4, 3, 1, 1, 1, 1]]
    assert batch["labels"].tolist() == [[-100, 6, 7, -100, 9, -100], [-100, 3] + [-100] * 4]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 0, 1, 2, 3]]
    assert as_batch([[document(5, 6, 7)]], pad=1, seq_len=64)["input_ids"].shape == (1, 8)


def test_trained_tokens_are_those_of_the_labels(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for packing in (True, False):
        loaded = load(tmp_path, write_lines(tmp_path / "c.jsonl", chats(40)), data__packing=packing)
        data = open_data(loaded.config, None)
        for part in (data.train, data.held_out):
            for indices in (np.arange(len(part)), np.array([0])):
                batch = part.batch(indices)
                assert part.trained_tokens(indices) == int((batch["labels"] >= 0).sum())
                # The loss looks one place ahead: no target may be of another document.
                assert (batch["labels"][batch["position_ids"] == 0] == -100).all()


def test_packing_keeps_every_document_once(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = write_lines(tmp_path / "c.jsonl", chats(60))

    def documents(packing):
        data = open_data(load(tmp_path, path, data__packing=packing).config, None)
        found = [
            (tokens.tobytes(), labels.tobytes())
            for part in (data.train, data.held_out)
            for row in range(len(part))
            for tokens, labels in part.documents(row)
        ]
        return len(data.train), sorted(found)

    packed, single = documents(True), documents(False)
    assert packed[1] == single[1]
    assert len(packed[1]) == 60
    assert packed[0] < single[0]
