"""Records of every kind of file, as they stand there, with their places."""

import gzip
import json

import pytest
from text_kit import chats, write_lines

from shardwise.errors import ConfigError
from shardwise.train.text.files import find_files, read_records

ROWS = [{"instruction": "1", "output": "2020-01-01"}, {"instruction": "NA", "output": "null\nx"}]


def read(path, tmp_path):
    return list(read_records(path, "text", tmp_path / "locks"))


def write(path, kind):
    if kind == "jsonl":
        path.write_text("\n\n".join(json.dumps(row) for row in ROWS))
    elif kind == "json":
        path.write_text(json.dumps(ROWS, indent=2))
    elif kind == "json.gz":
        path.write_bytes(gzip.compress(json.dumps(ROWS).encode()))
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress("\n".join(json.dumps(row) for row in ROWS).encode()))
    elif kind in ("csv", "tsv"):
        text = 'instruction,other,output\n1,,2020-01-01\nNA,3,"null\nx"\n'
        path.write_text("\ufeff" + (text.replace(",", "\t") if kind == "tsv" else text))
    elif kind == "parquet":
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)


@pytest.mark.parametrize("kind", ["jsonl", "json", "jsonl.gz", "json.gz", "csv", "tsv", "parquet"])
def test_values_are_what_stands_in_the_file(tmp_path, kind):
    """No text becomes a number, a date or nothing, as readers of tables like to guess."""
    path = tmp_path / f"rows.{kind}"
    write(path, kind)
    found = read(path, tmp_path)
    assert [{k: v for k, v in r.values.items() if k != "other"} for r in found] == ROWS
    places = {"jsonl": ":3", "csv": ", row 2", "tsv": ", row 2", "parquet": ", row 2"}
    assert str(found[1].place) == f"{path}{places.get(kind, ':2' if 'l' in kind else ', record 2')}"
    assert not (tmp_path / "home").exists()


def test_a_text_file_is_one_record(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one\n\ntwo\n")
    (record,) = read(path, tmp_path)
    assert record.values == {"text": "one\n\ntwo\n"}


def test_lines_of_json_are_cut_at_line_ends_only(tmp_path):
    """Other characters that Python takes for ends of lines stand in many texts."""
    text = "a\u2028b\x0b\x85c"
    path = write_lines(tmp_path / "a.jsonl", [{"text": text}, {"text": "b"}])
    assert [r.values["text"] for r in read(path, tmp_path)] == [text, "b"]


def test_folders_give_their_files_in_order(tmp_path):
    for name in ("b.jsonl", "a.json", "notes.txt", "deep/c.parquet", ".hidden.jsonl", "x.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    names = [p.name for p in find_files(str(tmp_path), "chat")]
    assert names == ["a.json", "b.jsonl", "c.parquet"]
    assert "notes.txt" in [p.name for p in find_files(str(tmp_path), "text")]
    assert len(find_files((str(tmp_path), str(tmp_path / "a.json")), "chat")) == 3


def test_nothing_is_left_in_the_cache_of_datasets(tmp_path, monkeypatch):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "theirs")
    read(write_lines(tmp_path / "a.jsonl", chats(3)), tmp_path)
    assert not (tmp_path / "theirs").exists()


def test_a_damaged_parquet_file_is_one_line(tmp_path):
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1 no")
    with pytest.raises(ConfigError, match="cannot be read") as found:
        read(path, tmp_path)
    assert "\n" not in str(found.value)


def test_no_script_beside_the_job_is_run(tmp_path, monkeypatch):
    """Names of readers are names of folders too."""
    for name in ("text", "json", "csv", "parquet"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.py").write_text("raise SystemExit('was run')")
    monkeypatch.chdir(tmp_path)
    for kind in ("jsonl", "csv", "parquet"):
        path = tmp_path / f"rows.{kind}"
        write(path, kind)
        assert len(read(path, tmp_path)) == 2
