"""Rows from files, folders and datasets by name; a bad line or a wrong name stops the run and is named."""

import json
import logging
from pathlib import Path

import datasets
import pytest

from data import DatasetConfig, load_rows


def write(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def read(path, **cfg) -> list[dict]:
    return list(load_rows(DatasetConfig(path=str(path), **cfg)))


LINES = ['{"question": "a"}', '{"question": "b"}', '{"question": "c"}', '{"question": "d"}']


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    "line, saying", [("{not json}", "not JSON"), ("[1, 2]", "expected an object"), ('"text"', "expected an object")]
)
def test_a_bad_line_stops_the_run_and_is_named(tmp_path, line, saying, streaming):
    """MakazhanAlpamys/Soup#548"""
    path = tmp_path / "d.jsonl"
    path.write_text("\n".join([*LINES[:2], line, LINES[3]]) + "\n")
    with pytest.raises(ValueError, match=rf"d\.jsonl, line 3: {saying}"):
        read(path, streaming=streaming)


def test_a_truncated_last_line_stops_the_run(tmp_path):
    (tmp_path / "d.jsonl").write_text("\n".join(LINES)[:-4])
    with pytest.raises(ValueError, match=r"d\.jsonl, line 4: not JSON"):
        read(tmp_path / "d.jsonl")


def test_half_a_character_is_named_and_a_whole_one_is_read(tmp_path):
    rows = [{"question": "\U0001f642"}, {"question": "\ud83d"}]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ValueError, match=r"d\.jsonl, line 2: not JSON .*surrogates"):
        read(tmp_path / "d.jsonl")
    (tmp_path / "d.jsonl").write_text(json.dumps(rows[0]))
    assert [row["question"] for row in read(tmp_path / "d.jsonl")] == ["\U0001f642"]


def test_a_line_that_is_not_utf8_is_named(tmp_path):
    (tmp_path / "d.jsonl").write_bytes(b'{"question": "a"}\n{"question": "\xff"}\n')
    with pytest.raises(ValueError, match=r"d\.jsonl, line 2"):
        read(tmp_path / "d.jsonl")


def test_empty_lines_are_ignored_but_counted(tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_text("\ufeff" + LINES[0] + "\n\n  \n" + LINES[1] + "\n\nbad\n")
    with pytest.raises(ValueError, match="line 6"):
        read(path)
    path.write_text("\ufeff" + LINES[0] + "\n\n  \r\n" + LINES[1])
    assert read(path) == [{"question": "a"}, {"question": "b"}]


def test_every_kind_of_file_holds_the_same_rows(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [{"question": f"q{i}", "answer": f"a{i}"} for i in range(5)]
    (tmp_path / "array.json").write_text("\n " + json.dumps(rows, indent=1))
    write(tmp_path / "lines.json", rows)
    write(tmp_path / "lines.jsonl", rows)
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "table.parquet")
    datasets.Dataset.from_list(rows).to_csv(tmp_path / "table.csv")
    for name in ("array.json", "lines.json", "lines.jsonl", "table.parquet", "table.csv"):
        for streaming in (False, True):
            assert read(tmp_path / name, streaming=streaming) == rows, name
    (tmp_path / "array.json").write_text('[{"question": "a"}, 3]')
    with pytest.raises(ValueError, match=r"array\.json, item 2: expected an object"):
        read(tmp_path / "array.json")


def test_a_folder_is_read_by_split(tmp_path):
    for name in ("train-00000", "train-00001", "test"):
        write(tmp_path / f"{name}.jsonl", [{"question": name}])
    found = {split: [r["question"] for r in read(tmp_path, split=split)] for split in ("train", "test")}
    assert found == {"train": ["train-00000", "train-00001"], "test": ["test"]}
    with pytest.raises(ValueError, match=r"dataset\.split=dev is in no file name of .*test\.jsonl"):
        read(tmp_path, split="dev")


def hub_copy(folder: Path, *names: str) -> str:
    """A folder laid out as a dataset of the hub, with a configuration per name."""
    configs = "".join(
        f"- config_name: {n}\n  data_files:\n  - {{split: train, path: {n}/train.jsonl}}\n" for n in names
    )
    (folder / "README.md").write_text(f"---\nconfigs:\n{configs}---\n")
    for name in names:
        (folder / name).mkdir()
        write(folder / name / "train.jsonl", [{"question": f"from {name}"}])
    return str(folder)


@pytest.fixture
def datasets_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize("streaming", [False, True])
def test_a_dataset_without_a_name_takes_main_and_says_so(tmp_path, streaming, caplog, datasets_cache):
    path = hub_copy(tmp_path, "main", "socratic")
    with caplog.at_level(logging.INFO, logger="data"):
        assert read(path, streaming=streaming) == [{"question": "from main"}]
    assert "dataset.name=main" in caplog.text
    assert read(path, name="socratic", streaming=streaming) == [{"question": "from socratic"}]


def test_a_dataset_without_a_usual_configuration_lists_those_it_has(tmp_path, datasets_cache):
    path = hub_copy(tmp_path, "easy", "hard")
    with pytest.raises(ValueError, match=r"set dataset\.name to one of its configurations \['easy', 'hard'\]"):
        read(path)
    with pytest.raises(ValueError, match=r"dataset\.path=.*name=nope.*easy"):
        read(path, name="nope")
    with pytest.raises(ValueError, match=r"split=nope.*train"):
        read(path, name="easy", split="nope")


def test_what_cannot_be_loaded_is_named_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"dataset\.path=nobody/nothing .* local file .*HF_HOME"):
        read("nobody/nothing")
    for path in (tmp_path / "none.jsonl", tmp_path / "none", "none.parquet"):
        with pytest.raises(ValueError, match=rf"dataset\.path={path}: there is no such file"):
            read(path)
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(ValueError, match=r"cannot read \['\.txt'\] files"):
        read(tmp_path / "notes.txt")
