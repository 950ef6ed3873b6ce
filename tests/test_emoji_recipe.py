"""The recipe on emoji: what is made of the packages, and which emoji are held out."""

from __future__ import annotations

import importlib
import importlib.util
import io
import json
import sys
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import fewstep
from fewstep.models.sd3 import SD3Settings

ROOT = Path(__file__).parents[1]
GRINNING, HEART, FOX, TWIN, FLAG = "1F600", "2764-FE0F", "1F98A", "1F43A", "1F1EF-1F1F5"
COLORS = {GRINNING: "yellow", HEART: "red", FOX: "orange", TWIN: "orange", FLAG: "white"}


@pytest.fixture(scope="module")
def fetch() -> Any:
    """`recipes/emoji/fetch.py` as a module."""
    spec = importlib.util.spec_from_file_location("fetch", ROOT / "recipes/emoji/fetch.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fetch"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def contents() -> tuple[dict[str, bytes], dict[str, bytes]]:
    """What is in a package of pictures and in one of names: few of each, in their own form."""
    pictures: dict[str, bytes] = {}
    listed = []
    for unified, color in COLORS.items():
        image = Image.new("RGBA", (64, 64), (0, 0, 0, 0))
        image.paste(color, (0, 0, 32, 64))
        file = io.BytesIO()
        image.save(file, "PNG")
        name = f"{unified.lower()}.png"
        pictures[f"img/twitter/64/{name}"] = file.getvalue()
        listed.append({"unified": unified, "image": name})
    listed.append({"unified": "1F3FB", "image": "1f3fb.png"})  # a skin tone: it has no name
    listed.append({"unified": "1F525", "image": "1f525.png"})  # fire: there is no picture
    pictures["emoji.json"] = json.dumps(listed).encode()
    pictures["img/twitter/sheets/64.png"] = b"not needed"
    face = {"name": "Grinning Face", "group": "Smileys & Emotion"}
    named = {
        "😀": face,
        "❤": {"name": "red heart", "group": "Smileys & Emotion"},  # without its selector
        "🦊": {"name": "fox", "group": "Animals & Nature"},
        "🐺": {"name": "wolf", "group": "Animals & Nature"},
        "🇯🇵": {"name": "flag Japan", "group": "Flags"},
        "🔥": {"name": "fire", "group": "Travel & Places"},
    }
    return pictures, {"data-by-emoji.json": json.dumps(named).encode()}


def write_package(folder: Path, files: Mapping[str, bytes]) -> Path:
    """A package as it is unpacked."""
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


@pytest.fixture
def packages(tmp_path: Path) -> tuple[Path, Path]:
    """Both packages, unpacked."""
    pictures, names = contents()
    return write_package(tmp_path / "pictures", pictures), write_package(tmp_path / "names", names)


@pytest.mark.parametrize(
    ("name", "prompt"),
    [
        ("grinning face", "grinning face"),
        ("Statue of Liberty", "statue of liberty"),
        ("twelve o’clock", "twelve o'clock"),
        ("piñata", "pinata"),
        ("hammer & pick", "hammer and pick"),
        ("Japanese “no vacancy” button", "japanese no vacancy button"),
        ("  two   spaces ", "two spaces"),
    ],
)
def test_names_become_plain_lower_case_prompts(fetch, name, prompt) -> None:
    assert fetch.clean_name(name) == prompt


def test_only_emoji_of_chosen_groups_with_name_and_picture_are_taken(fetch, packages) -> None:
    found = fetch.read_emoji(*packages)
    assert [one.prompt for one in found] == ["fox", "grinning face", "red heart", "wolf"]
    assert [one.picture.stem for one in found] == ["1f98a", "1f600", "2764-fe0f", "1f43a"]


def test_of_names_with_one_picture_the_shortest_is_kept(fetch, packages) -> None:
    kept = fetch.distinct(fetch.read_emoji(*packages))
    assert [one.prompt for one in kept] == ["fox", "grinning face", "red heart"]


def test_pictures_are_put_on_white_and_averaged(fetch, tmp_path) -> None:
    image = Image.new("RGBA", (64, 64), (0, 0, 0, 0))
    image.paste((255, 0, 0, 255), (0, 0, 33, 64))
    image.save(tmp_path / "half.png")
    drawn = fetch.draw_on_white(tmp_path / "half.png")
    assert drawn.size == (32, 32)
    assert [drawn.getpixel((x, 5)) for x in (15, 16, 17)] == [
        (255, 0, 0),
        (255, 128, 128),  # one column of red, and one of white
        (255, 255, 255),
    ]


def test_what_is_held_out_depends_on_its_own_name_alone(fetch) -> None:
    emoji = [fetch.Emoji(f"emoji {i}", Path(f"{i}.png")) for i in range(200)]
    train, held_out = fetch.split(emoji, 20)
    assert len(held_out) == 20
    assert sorted([*train, *held_out], key=emoji.index) == emoji
    backwards = fetch.split(emoji[::-1], 20)[1]
    assert backwards == held_out[::-1]
    # More emoji push some out of those held out, and bring none in but themselves.
    more = [fetch.Emoji(f"new {i}", Path(f"new{i}.png")) for i in range(200)]
    kept = fetch.split([*emoji, *more], 20)[1]
    assert {one for one in kept if one in emoji} < {*held_out}


def test_known_emoji_stay_held_out(fetch) -> None:
    """Runs on one machine and another are compared by the same prompts."""
    names = ("pizza", "red heart", "hamster", "fire", "sushi", "rocket")
    held_out = fetch.split([fetch.Emoji(name, Path(name)) for name in names], 3)[1]
    assert [one.prompt for one in held_out] == ["pizza", "hamster", "sushi"]


def test_packages_become_two_folders_of_images_and_prompts(
    fetch, tmp_path, monkeypatch, capsys
) -> None:
    out = tmp_path / "emoji"
    (out / "packages").mkdir(parents=True)
    for package, files in zip((fetch.PICTURES, fetch.NAMES), contents(), strict=True):
        name, _, version = package.rpartition("@")
        archive = out / "packages" / f"{name}-{version}.tgz"
        with tarfile.open(archive, "w:gz") as archived:
            for path, content in files.items():
                member = tarfile.TarInfo(f"package/{path}")
                member.size = len(content)
                archived.addfile(member, io.BytesIO(content))
        monkeypatch.setitem(
            fetch.SHA256, package, fetch.hashlib.sha256(archive.read_bytes()).hexdigest()
        )
    monkeypatch.setattr(fetch, "HELD_OUT", 1)
    monkeypatch.setattr(fetch.subprocess, "run", None)  # nothing is fetched that is there
    for _ in range(2):  # the second time from what is unpacked
        fetch.main(["--out", str(out)])
    rows = {
        part: [json.loads(line) for line in (out / part / "metadata.jsonl").open()]
        for part in ("train", "held_out")
    }
    assert [row["text"] for row in rows["train"]] == ["grinning face", "red heart"]
    assert rows["held_out"] == [{"file_name": "1f98a.png", "text": "fox"}]
    for part, part_rows in rows.items():
        files = {"metadata.jsonl", *(row["file_name"] for row in part_rows)}
        assert {file.name for file in (out / part).iterdir()} == files
    with Image.open(out / "train/1f600.png") as drawn:
        assert (drawn.size, drawn.mode) == ((32, 32), "RGB")
        assert drawn.getpixel((0, 0)) == (255, 255, 0)
    assert not list(out.glob("packages/*/img/twitter/sheets"))
    assert "2 emoji" in capsys.readouterr().out


def test_another_archive_than_the_pinned_one_is_refused(fetch, tmp_path) -> None:
    name, _, version = fetch.NAMES.rpartition("@")
    (tmp_path / f"{name}-{version}.tgz").write_bytes(b"something else")
    with pytest.raises(SystemExit, match="SHA-256"):
        fetch.fetch(fetch.NAMES, tmp_path)
    assert not (tmp_path / f"{name}-{version}").exists()


def test_teacher_and_student_fit_each_other() -> None:
    teacher, student = (
        fewstep.load_recipe(ROOT / f"recipes/emoji/{name}.yaml") for name in ("teacher", "student")
    )
    assert isinstance(teacher.model, SD3Settings)
    assert isinstance(student.model, SD3Settings)
    assert student.model.weights == teacher.run_dir
    for key in ("text_encoder", "max_sequence_length"):
        assert getattr(student.model, key) == getattr(teacher.model, key)
    assert student.data == teacher.data
    model = teacher.model.build()
    assert model.sample_shape == (3, 32, 32)
    network = model.build_network()
    assert sum(parameter.numel() for parameter in network.parameters()) < 3e6
    assert model.example_condition(1)["prompt_embeds"].shape == (1, 12, 384)


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`examples/emoji_demo.py` as a module."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    return importlib.import_module("emoji_demo")


def test_the_demo_counts_images_that_are_nearest_to_the_picture_of_their_prompt(demo) -> None:
    real = torch.eye(4)[:, None, :, None]
    noise = 0.1 * torch.randn(real.shape, generator=torch.Generator().manual_seed(0))
    assert demo.own_picture(real + noise, real) == 1
    assert demo.own_picture(real[[1, 0, 2, 3]] + noise, real) == 0.5
