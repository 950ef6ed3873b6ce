"""Prompts out of files of every kind, as other programs write them."""

from __future__ import annotations

import builtins
import csv
import io
import json
import tarfile
from pathlib import Path

import pyarrow
import pytest
from pyarrow import parquet

from fewstep.data.prompts import read_prompts
from fewstep.data.sources import braces, expand
from fewstep.errors import UserError

PROMPTS = [
    "a red circle",
    'two "quoted" words, and a comma',
    "a line\nbreak",
    "猫 ☕ é",
    "a red circle",
]
ONE_LINERS = [text for text in PROMPTS if "\n" not in text]


def texts(file: Path, column: str | None = None, split: str = "train") -> list[str | None]:
    return [each.text for each in read_prompts([str(file)], column, split)]


def faults(file: Path, column: str | None = None) -> list[str]:
    found = read_prompts([str(file)], column, "train")
    return [f"{each.where.rpartition('/')[2]}: {each.fault()}" for each in found if each.fault()]


def write_tar(file: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(file, "w") as tar:
        for name, value in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(value)
            tar.addfile(entry, io.BytesIO(value))
    return file


def test_a_text_file_has_a_prompt_a_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    # Other line separators of Unicode belong to a prompt; so does what ends lines on Windows not.
    file.write_bytes("\ufeffone\r\n  zwei\u2028drei \n猫".encode())
    assert texts(file) == ["one", "zwei\u2028drei", "猫"]
    file.write_text("one\n\n  \ntwo\n")
    assert faults(file) == [
        "prompts.txt:2: the prompt is empty",
        "prompts.txt:3: the prompt is empty",
    ]


def test_jsonl(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(json.dumps({"id": 1, "prompt": text}) for text in PROMPTS) + "\n\n")
    assert texts(file, "prompt") == PROMPTS
    with pytest.raises(UserError, match=r"no column 'text'; it has 'id', 'prompt'"):
        texts(file)


def test_lines_of_json_that_are_wrong_are_named(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"text": "good"}\n{"text": 3}\n{"text": null}\n{bad\n[1]\n{"other": "x"}\n')
    assert faults(file) == [
        "p.jsonl:2: the prompt is no text but int",
        "p.jsonl:3: there is no prompt",
        "p.jsonl:4: the line is not JSON",
        "p.jsonl:5: the line is not a JSON object",
        "p.jsonl:6: there is no prompt",
    ]


def test_csv_as_the_standard_library_writes_it(tmp_path: Path) -> None:
    file = tmp_path / "prompts.csv"
    with open(file, "w", newline="", encoding="utf-8-sig") as stream:
        writer = csv.DictWriter(stream, ["id", "text"])
        writer.writeheader()
        writer.writerows({"id": i, "text": text} for i, text in enumerate(PROMPTS))
    assert texts(file) == PROMPTS
    with pytest.raises(UserError, match=r"no column 'prompt'; it has 'id', 'text'"):
        texts(file, "prompt")


def test_a_csv_that_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "p.csv"
    file.write_text("id,text\n1,good\n2\n3,a,b\n")
    assert faults(file) == [
        "p.csv:3: the row has 1 values for 2 columns",
        "p.csv:4: the row has 3 values for 2 columns",
    ]
    file.write_text('text\n"never closed\n')
    with pytest.raises(UserError, match=r"p.csv: line \d is not CSV"):
        texts(file)
    file.write_text("")
    with pytest.raises(UserError, match=r"p.csv is empty: its first line should name the columns"):
        texts(file)


def test_parquet_as_pyarrow_writes_it(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    file = tmp_path / "prompts.parquet"
    table = arrow.table({"caption": [*PROMPTS, None], "id": range(6)})
    parquet.write_table(table, file, row_group_size=2)
    assert texts(file, "caption") == [*PROMPTS, None]
    assert faults(file, "caption") == ["prompts.parquet, row 6: there is no prompt"]
    with pytest.raises(UserError, match=r"no column 'text'; it has 'caption', 'id'"):
        texts(file)
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(UserError, match=r"prompts.parquet is no Parquet file that can be read"):
        texts(file, "caption")


def test_a_data_set_as_the_library_datasets_saves_it(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    one = datasets.Dataset.from_dict({"text": PROMPTS, "id": list(range(5))})
    one.save_to_disk(tmp_path / "one")
    assert texts(tmp_path / "one") == PROMPTS
    both = datasets.DatasetDict({"train": one, "test": one.select([3])})
    both.save_to_disk(tmp_path / "both")
    assert texts(tmp_path / "both", split="test") == PROMPTS[3:4]
    with pytest.raises(UserError, match=r"data.split: .*both has no 'val'; it has train, test"):
        texts(tmp_path / "both", split="val")
    with pytest.raises(UserError, match=r"no column 'prompt'; it has 'text', 'id'"):
        texts(tmp_path / "one", "prompt")
    next((tmp_path / "one").glob("*.arrow")).write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"one cannot be loaded"):
        texts(tmp_path / "one")


def test_a_name_on_the_hub_is_given_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(name: str):
        asked.append(name)
        return datasets.DatasetDict({"train": datasets.Dataset.from_dict({"text": PROMPTS})})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert texts("hf:owner/name") == PROMPTS
    assert asked == ["owner/name"]


@pytest.mark.parametrize("library", ["pyarrow", "datasets"])
def test_a_missing_library_is_named_with_what_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: str
) -> None:
    original = builtins.__import__

    def without(name: str, *arguments):
        if name.partition(".")[0] == library:
            raise ImportError(name)
        return original(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without)
    name = str(tmp_path / "x.parquet") if library == "pyarrow" else "hf:owner/name"
    with pytest.raises(
        UserError, match=rf"needs the library {library}: pip install 'fewstep\[data"
    ):
        texts(name)


def test_shards(tmp_path: Path) -> None:
    members = {}
    for number, text in enumerate(PROMPTS):
        members[f"./part/{number:04d}.txt"] = text.encode()
        members[f"./part/{number:04d}.json"] = json.dumps({"caption": f"{text}!"}).encode()
    file = write_tar(tmp_path / "a.tar", members)
    assert texts(file) == PROMPTS
    assert texts(file, "caption") == [f"{text}!" for text in PROMPTS]


def test_shards_that_are_wrong(tmp_path: Path) -> None:
    members = {"a.txt": b"good", "b.json": b"{}", "c.txt": b"\xff\xfe", "d.txt": b" "}
    file = write_tar(tmp_path / "x.tar", members)
    assert faults(file) == [
        "x.tar, b: there is no .txt",
        "x.tar, c: its .txt is not UTF-8",
        "x.tar, d: the prompt is empty",
    ]
    assert faults(file, "k")[:2] == [
        "x.tar, a: there is no .json",
        "x.tar, b: its .json has no 'k' ()",
    ]
    file = write_tar(tmp_path / "x.tar", {"a.json": b'{"k": "\\ud83d"}', "b.json": b"[" * 10**5})
    assert faults(file, "k") == [
        "x.tar, a: the prompt is no Unicode text: character 1 is half of one",
        "x.tar, b: its .json cannot be read",
    ]
    for content in (b"nothing of the kind" * 100, b"\x1f\x8b" + bytes(600)):
        file.write_bytes(content)
        with pytest.raises(UserError, match=r"x.tar is no plain tar file: .* not be compressed"):
            texts(file)
    whole = write_tar(file, {"a.txt": bytes(range(65, 90)) * 100}).read_bytes()
    file.write_bytes(whole[:1500])
    with pytest.raises(UserError, match=r"x.tar ends in the middle of a.txt"):
        texts(file)


def test_two_samples_of_one_name_are_no_sample(tmp_path: Path) -> None:
    file = tmp_path / "x.tar"
    with tarfile.open(file, "w") as tar:
        for name in ("a.txt", "a.json", "a.TXT", "b.txt"):
            tar.addfile(tarfile.TarInfo(name))
    assert faults(file) == [
        "x.tar, a: it has .txt twice: are these two samples?",
        "x.tar, b: the prompt is empty",
    ]


def test_a_shard_is_read_to_its_end_or_refused(tmp_path: Path) -> None:
    members = {f"{number}.txt": b"text" for number in range(4)}  # two blocks each
    file = write_tar(tmp_path / "x.tar", members)
    whole = file.read_bytes()
    wrong = bytearray(whole)
    wrong[2048 + 10] ^= 1  # in the third header
    for content in (whole[:2048], whole[:2048] + whole[2048:2300], bytes(wrong), whole + whole):
        file.write_bytes(content)
        with pytest.raises(UserError, match=r"x.tar is damaged or cut off: .* byte (2048|4096) "):
            texts(file)
    file.write_bytes(whole[: 4096 + 512])
    assert texts(file) == ["text"] * 4


def test_what_is_no_text_is_named(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    nested = '{"text": ' + "[" * 10**5
    file.write_text(
        '{"text": "an emoji \\ud83d\\ude00"}\n{"text": "half \\ud83d of one"}\n' + nested
    )
    assert texts(file)[0] == "an emoji 😀"
    assert faults(file) == [
        "p.jsonl:2: the prompt is no Unicode text: character 6 is half of one",
        "p.jsonl:3: the line is not JSON",
    ]
    values = pyarrow.array([b"a", b"\xff", b"c"], pyarrow.binary()).view(pyarrow.string())
    parquet.write_table(pyarrow.table({"text": values}), tmp_path / "p.parquet")
    assert texts(tmp_path / "p.parquet") == ["a", None, "c"]
    assert faults(tmp_path / "p.parquet") == ["p.parquet, row 2: the prompt is not UTF-8"]


def test_a_column_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "p.csv"
    file.write_text("text,text\na,b\n")
    with pytest.raises(UserError, match=r"p.csv has more than one column 'text'"):
        texts(file)
    file.write_text("text,,\na,b,c\n")
    assert texts(file) == ["a"]
    column = pyarrow.array(["a"])
    table = pyarrow.Table.from_arrays([column, column], ["text", "text"])
    parquet.write_table(table, tmp_path / "p.parquet")
    with pytest.raises(UserError, match=r"p.parquet has more than one column 'text'"):
        texts(tmp_path / "p.parquet")


@pytest.mark.parametrize("ending", ["txt", "TXT", "jsonl"])
def test_a_file_that_is_empty_or_in_another_encoding(tmp_path: Path, ending: str) -> None:
    file = tmp_path / f"p.{ending}"
    file.write_text("")
    with pytest.raises(UserError, match=rf"p.{ending} is empty: there is no prompt in it"):
        texts(file)
    file.write_bytes("eins\nzwei\nFußball".encode("latin-1"))
    with pytest.raises(UserError, match=rf"p.{ending}: line 3 is not UTF-8 \(byte 0xdf\)"):
        texts(file)


def test_other_kinds_are_refused(tmp_path: Path) -> None:
    (tmp_path / "p.xlsx").write_text("")
    (tmp_path / "p.txt").write_text("one")
    with pytest.raises(UserError, match=r"p.xlsx is of no known kind: .txt, .jsonl"):
        texts(tmp_path / "p.xlsx")
    with pytest.raises(UserError, match="is a directory, but not one of"):
        texts(tmp_path)
    with pytest.raises(
        UserError, match=r"data.column: 'text' is given, but .*p.txt has no columns"
    ):
        texts(tmp_path / "p.txt", "text")


def test_patterns(tmp_path: Path) -> None:
    names = ["a08.tar", "a09.tar", "a10.tar", "b.txt", "odd[1].txt"]
    for name in names:
        (tmp_path / name).touch()

    def found(*patterns: str) -> list[str]:
        return [Path(p).name for p in expand("data.files", [f"{tmp_path}/{p}" for p in patterns])]

    assert found("a{08..10}.tar", "odd[1].txt") == [*names[:3], names[4]]
    assert found("a*.tar", "{b}.txt".replace("{b}", "b")) == names[:4]
    assert found("{b,a09}.t*") == ["b.txt", "a09.tar"]
    assert list(braces("x{9..11}-{p,q}")) == [f"x{n}-{c}" for n in (9, 10, 11) for c in "pq"]
    with pytest.raises(UserError, match=r"data.files: .*a11.tar' does not exist"):
        found("a{08..11}.tar")
    with pytest.raises(UserError, match=r"a08.tar is named twice"):
        found("a*.tar", "a08.tar")
    with pytest.raises(UserError, match=r"a08.tar is named twice"):
        found("a*.tar", "./a08.tar")
    (tmp_path / "link.tar").symlink_to(tmp_path / "a08.tar")
    with pytest.raises(UserError, match=r"link.tar is named twice"):
        found("a*.tar", "link.tar")
    with pytest.raises(UserError, match=r"data.files: .*a\{10..08\}.tar' matches nothing: its num"):
        found("b.txt", "a{10..08}.tar")
