"""Encoding: what is written, that it goes on after a stop, and that nothing stale is used."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from double import DoubleAutoencoder, DoubleEncoder, DoubleModel
from PIL import Image

import fewstep
from fewstep.config import Recipe, dump_recipe
from fewstep.data.encoded import EncodedItems
from fewstep.errors import UserError
from fewstep.launch import encode as encoding
from fewstep.launch.processes import launch
from fewstep.models.encoders import Encoding

pytestmark = pytest.mark.usefixtures("no_sync")
DOUBLE = Path(__file__).with_name("double.py")
PROMPTS = ("a red circle", "ein Fußball", "a red circle", "猫, with \u2028 inside", "five")


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Five prompts, two of them equal, in a file."""
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(PROMPTS) + "\n")
    return file


@pytest.fixture
def images(tmp_path: Path) -> Path:
    """Five images of one colour each, with captions beside them."""
    folder = tmp_path / "images"
    folder.mkdir()
    for number in range(5):
        Image.new("RGB", (12, 9), (50 * number, 0, 0)).save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"image {number}\n")
    return folder


def content(recipe: Recipe) -> dict[str, bytes]:
    """All files of a recipe's encoded data."""
    return {file.name: file.read_bytes() for file in recipe.data.directory.iterdir()}


def test_prompts_are_encoded_and_read_back(data_recipe, prompts) -> None:
    recipe, model = data_recipe("prompts", prompts), DoubleModel()
    encoded = fewstep.encode(recipe, model=model)
    items = recipe.data.load()
    assert (encoded.items, encoded.skipped, encoded.made) == ({"train": 5}, [], 3)
    assert list(items.prompts) == list(PROMPTS)
    expected = DoubleEncoder().encode(PROMPTS)
    order = torch.tensor([4, 0, 3, 3, 1])
    for key, value in items.condition(order).items():
        assert torch.equal(value, expected[key][order]), key
    for key, value in items.unconditional.items():
        assert torch.equal(value, DoubleEncoder().encode([""])[key][0]), key
    assert not items.has_samples
    with pytest.raises(ValueError, match="prompts alone"):
        items.x0(order)
    with pytest.raises(IndexError, match="from 0 to 4"):
        items.condition(torch.tensor([5]))


def test_images_are_encoded_and_read_back(data_recipe, images) -> None:
    recipe = data_recipe("images", images)
    fewstep.encode(recipe, model=DoubleModel())
    items = recipe.data.load()
    assert items.prompts[1:3] == ["image 1", "image 2"]
    red = torch.tensor([0, 50, 200]) / 127.5 - 1
    pixels = torch.stack([red, torch.full((3,), -1.0), torch.full((3,), -1.0)], 1)
    flat = DoubleAutoencoder().encode(pixels[:, :, None, None].expand(3, 3, 8, 8))
    assert torch.allclose(items.x0(torch.tensor([0, 1, 4])), flat, atol=1e-6)
    assert items.x0(torch.tensor([0])).shape == (1, 4, 4, 4)


def test_only_the_place_travels_to_another_process(data_recipe, images) -> None:
    recipe = data_recipe("images", images)
    fewstep.encode(recipe, model=DoubleModel())
    items = recipe.data.load()
    items.x0(torch.arange(5))
    sent = pickle.dumps(items)
    assert len(sent) < 1000
    again = pickle.loads(sent)
    assert torch.equal(again.x0(torch.arange(5)), items.x0(torch.arange(5)))
    assert again.sha256 == items.sha256


def test_equal_prompts_are_encoded_once_a_shard(data_recipe, prompts) -> None:
    model = DoubleModel()
    recipe = data_recipe("prompts", prompts, shard_items=4)
    fewstep.encode(recipe, model=model)
    assert model.encoder.seen == ["", *PROMPTS[:2], PROMPTS[3], PROMPTS[4]]
    shard = EncodedItems(recipe.data.directory)._tensors(0)
    assert (len(shard["condition/text"]), shard["prompt"].tolist()) == (3, [0, 1, 0, 2])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_conditions_are_stored_in_the_dtype_that_is_asked_for(data_recipe, images, dtype) -> None:
    recipe = data_recipe("images", images, dtype=dtype)
    fewstep.encode(recipe, model=DoubleModel())
    items = recipe.data.load()
    condition = items.condition(torch.arange(5))
    assert condition["text"].dtype == items.unconditional["text"].dtype == getattr(torch, dtype)
    assert condition["words"].dtype == torch.int64
    assert items.x0(torch.arange(5)).dtype == torch.float32


def test_the_manifest_says_what_is_there(data_recipe, images) -> None:
    recipe = data_recipe("images", images, validation_items=1)
    fewstep.encode(recipe, model=DoubleModel(salt="x"))
    manifest = json.loads((recipe.data.directory / "manifest.json").read_text())
    assert manifest["items"] == {"train": 4, "validation": 1}
    assert manifest["condition"] == {
        "text": {"shape": [3, 4], "dtype": "F32"},
        "words": {"shape": [], "dtype": "I64"},
    }
    assert manifest["x0"] == {"shape": [4, 4, 4], "dtype": "F32"}
    assert manifest["plan"]["encoder"] == {"class": "DoubleEncoder", "salt": "x"}
    assert manifest["plan"]["autoencoder"] == {"class": "DoubleAutoencoder"}
    assert manifest["plan"]["computed"]["picture"] == [8, 8, "RGB"]
    assert {*manifest["files"], "manifest.json"} == set(content(recipe))
    files = list(recipe.data.directory.iterdir())
    assert len({file.stat().st_mode for file in files}) == 1  # others may read all, or none


def test_held_out_items_are_the_last_or_files_of_their_own(data_recipe, prompts, tmp_path) -> None:
    recipe = data_recipe("prompts", prompts, validation_items=2)
    fewstep.encode(recipe, model=DoubleModel())
    assert list(recipe.data.load().prompts) == list(PROMPTS[:3])
    assert list(recipe.data.load("validation").prompts) == list(PROMPTS[3:])
    other = tmp_path / "other.txt"
    other.write_text("held out\n")
    changed = {"encoded": str(tmp_path / "b"), "validation": [str(other)]}
    recipe = data_recipe("prompts", prompts, **changed)
    fewstep.encode(recipe, model=DoubleModel())
    assert len(recipe.data.load()) == 5
    assert list(recipe.data.load(split="validation").prompts) == ["held out"]
    other.write_text("five\nheld out\na red circle\n\n")
    encoded = fewstep.encode(
        data_recipe("prompts", prompts, **changed), model=DoubleModel(), overwrite=True
    )
    assert (encoded.items["validation"], encoded.trained_on) == (3, 2)
    said = list(encoding.summary(encoded, tmp_path / "recipe.yaml", ()))
    assert "Held out: 2 of 3 items have a prompt that is trained on as well" in said
    recipe = data_recipe("prompts", prompts, encoded=str(tmp_path / "c"))
    fewstep.encode(recipe, model=DoubleModel())
    assert recipe.data.load("validation") is None


def test_only_items_that_are_encoded_count_as_held_out_or_trained_on(
    data_recipe, images, tmp_path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for name in ("0", "1"):  # of the second only the caption can be used
        shutil.copy(images / f"{name}.txt", other)
    shutil.copy(images / "0.png", other)
    (other / "1.png").write_bytes(b"no image")
    (images / "0.png").write_bytes(b"no image either")
    recipe = data_recipe("images", images, validation=[str(other)])
    encoded = fewstep.encode(recipe, model=DoubleModel())
    assert (encoded.items, encoded.trained_on) == ({"train": 4, "validation": 1}, 0)


def test_data_are_known_by_their_content_however_they_are_named(
    data_recipe, prompts, tmp_path, monkeypatch
) -> None:
    def content(*files: object, **changes: object) -> object:
        recipe = data_recipe("prompts", *files, **changes)
        fewstep.encode(recipe, model=DoubleModel())
        return recipe.data.content()

    monkeypatch.chdir(tmp_path)
    first = content(prompts)
    assert content("./prompts.txt", encoded="b", dtype="bfloat16", shard_items=1) == first
    assert content(prompts, encoded="c", validation_items=1) != first
    prompts.write_text(prompts.read_text().replace("five", "FIVE"))
    assert content(prompts, encoded="d") != first
    assert data_recipe("prompts", prompts, encoded="nothing").data.content() is None


def test_the_data_set_is_known_by_what_training_sees_of_it(data_recipe, prompts, tmp_path) -> None:
    def sha(name: str, salt: str = "", **others: object) -> str:
        recipe = data_recipe("prompts", prompts, encoded=str(tmp_path / name), **others)
        fewstep.encode(recipe, model=DoubleModel(salt))
        return recipe.data.load().sha256

    first = sha("a")
    assert first == sha("b")
    assert len({first, sha("c", salt="x"), sha("d", validation_items=1)}) == 3


def start(recipe: Recipe, tmp_path: Path, seconds: str = "0") -> subprocess.Popen[str]:
    """Encode in a process of its own."""
    file = tmp_path / "recipe.yaml"
    file.write_text(dump_recipe(recipe))
    return subprocess.Popen(
        [sys.executable, str(DOUBLE), str(file)],
        env={**os.environ, "ENCODE_SECONDS": seconds},
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_an_encoding_that_is_killed_goes_on_with_the_same_bytes(
    data_recipe, images, tmp_path
) -> None:
    whole = data_recipe("images", images, encoded=str(tmp_path / "whole"))
    fewstep.encode(whole, model=DoubleModel())
    recipe = data_recipe("images", images, encoded=str(tmp_path / "killed"))
    process = start(recipe, tmp_path, "0.7")
    first = recipe.data.directory / "train-00000.json"
    while not first.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    with pytest.raises(UserError, match=r"encoded: .*killed is in use: process \d+ writes there"):
        fewstep.encode(recipe, model=DoubleModel())
    process.send_signal(signal.SIGKILL)
    process.communicate()
    with pytest.raises(UserError, match="holds no complete encoded data; make it with `fewstep en"):
        recipe.data.load()
    kept = (recipe.data.directory / "train-00000.safetensors").stat().st_mtime_ns
    (recipe.data.directory / ".train-00001.safetensors.tmp").write_bytes(b"half of it")
    encoded = fewstep.encode(recipe, model=DoubleModel())
    assert 1 <= encoded.made <= 2
    assert (recipe.data.directory / "train-00000.safetensors").stat().st_mtime_ns == kept
    assert content(recipe).keys() == content(whole).keys()
    assert content(recipe) == content(whole)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_write_what_one_process_writes(data_recipe, images, tmp_path) -> None:
    (images / "2.png").write_bytes(b"no image")
    whole = data_recipe("images", images, encoded=str(tmp_path / "whole"), validation_items=1)
    fewstep.encode(whole, model=DoubleModel())
    recipe = data_recipe("images", images, encoded=str(tmp_path / "ranks"), validation_items=1)
    file = tmp_path / "recipe.yaml"
    file.write_text(dump_recipe(recipe))
    assert launch([str(DOUBLE), str(file)], 2, 5).code == 0
    assert content(recipe) == content(whole)


def test_what_is_complete_is_said_to_be_so_and_checked(data_recipe, prompts) -> None:
    recipe = data_recipe("prompts", prompts)
    fewstep.encode(recipe, model=DoubleModel())
    before = content(recipe)
    model = DoubleModel()
    assert fewstep.encode(recipe, model=model).made == 0
    assert model.encoder.seen == []
    damaged = recipe.data.directory / "train-00001.safetensors"
    whole = damaged.read_bytes()
    damaged.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    (recipe.data.directory / "train-00002.safetensors").unlink()
    assert fewstep.encode(recipe, model=model).made == 2
    assert content(recipe) == before


@pytest.mark.parametrize("name", ["train-00001.safetensors", "none.safetensors"])
def test_missing_and_damaged_files_are_named(data_recipe, prompts, name: str) -> None:
    recipe = data_recipe("prompts", prompts)
    fewstep.encode(recipe, model=DoubleModel())
    file = recipe.data.directory / name
    whole = file.read_bytes()
    file.write_bytes(b"?" * len(whole))
    with pytest.raises(UserError, match=rf"{name} is damaged and cannot be read"):
        recipe.data.load().condition(torch.arange(5))
    file.write_bytes(whole[:-1])
    with pytest.raises(UserError, match=rf"{name} has \d+ bytes instead of \d+; make it again"):
        recipe.data.load()
    file.unlink()
    with pytest.raises(UserError, match=rf"{name} is missing; make it again with `fewstep encode`"):
        recipe.data.load()
    (recipe.data.directory / "manifest.json").write_text("{")
    with pytest.raises(UserError, match=r"manifest.json is damaged .*Remove the direc"):
        recipe.data.load()


def test_what_cannot_be_used_is_skipped_and_listed(data_recipe, images) -> None:
    (images / "1.png").write_bytes((images / "1.png").read_bytes()[:50])
    (images / "2.txt").write_text(" ")
    (images / "3.txt").unlink()
    recipe = data_recipe("images", images)
    encoded = fewstep.encode(recipe, model=DoubleModel())
    assert encoded.items == {"train": 2}
    assert [Path(where).name for where, _ in encoded.skipped] == ["1.png", "2.png", "3.png"]
    problems = [problem for _, problem in encoded.skipped]
    assert problems[0].startswith("the image cannot be read")
    assert problems[1:] == ["the prompt is empty", "there is no 3.txt"]
    manifest = json.loads((recipe.data.directory / "manifest.json").read_text())
    assert manifest["skipped"] == encoded.skipped
    assert list(recipe.data.load().prompts) == ["image 0", "image 4"]
    strict = data_recipe("images", images, on_bad="error")
    with pytest.raises(UserError, match=r"1.png: the image cannot be read.*and 2 more; put it rig"):
        strict.data.load()


def test_a_file_name_that_is_not_utf8_is_listed(data_recipe, images, tmp_path) -> None:
    name = os.fsdecode(b"caf\xe9.png")
    (images / "4.png").rename(images / name)  # without a caption now
    recipe = data_recipe("images", images)
    encoded = fewstep.encode(recipe, model=DoubleModel())
    assert Path(encoded.skipped[0][0]).name == name
    manifest = json.loads((recipe.data.directory / "manifest.json").read_text())
    assert manifest["skipped"] == encoded.skipped
    assert fewstep.encode(recipe, model=DoubleModel()).skipped == encoded.skipped


def test_what_cannot_be_used_is_refused_on_request(data_recipe, prompts, tmp_path) -> None:
    prompts.write_text("one\ntwo\nthree\n\nfive\n")
    recipe = data_recipe("prompts", prompts, on_bad="error")
    with pytest.raises(UserError, match=r"prompts.txt:4: the prompt is empty; put it right, or"):
        fewstep.encode(recipe, model=DoubleModel())
    prompts.write_text("\n\n")
    recipe = data_recipe("prompts", prompts, encoded=str(tmp_path / "b"))
    with pytest.raises(UserError, match=r"data: no train item can be used, 2 were skipped"):
        fewstep.encode(recipe, model=DoubleModel())


CHANGES = {
    "text": "prompts.txt: its content has changed",
    "glob": "p2.txt: is new",
    "column": "data.column: was None, is 'caption'",
    "dtype": "data.dtype: was 'float32', is 'bfloat16'",
    "validation_items": "data.validation_items: was 0, is 1",
    "encoder": "model.salt: was '', is 'x'",
    "weights": "encoders.weights: its content has changed",
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_change_is_noticed_by_encode_and_by_train(
    data_recipe, prompts, tmp_path, what: str
) -> None:
    weights = tmp_path / "weights.bin"
    weights.write_bytes(b"first")
    files, salt, others = [prompts, tmp_path / "p[0-9].txt"], "", {}
    (tmp_path / "p1.txt").write_text("a")
    recipe = data_recipe("prompts", *files)
    fewstep.encode(recipe, model=DoubleModel(weights=weights))
    if what == "text":
        prompts.write_text("\n".join(PROMPTS).replace("five", "FIVE") + "\n")
    elif what == "glob":
        (tmp_path / "p2.txt").write_text("b")
    elif what == "encoder":
        salt = "x"
    elif what == "weights":
        weights.write_bytes(b"other")
    else:
        others = {what: {"column": "caption", "dtype": "bfloat16", "validation_items": 1}[what]}
    recipe = data_recipe("prompts", *files, method="dmd2", **others)
    model = DoubleModel(salt, weights=weights)
    with pytest.raises(UserError) as told:
        fewstep.train(recipe, model=model)
    assert CHANGES[what] in str(told.value)
    assert "was made from something else" in str(told.value)
    assert "`fewstep encode RECIPE --overwrite`" in str(told.value)
    assert model.encoder.seen == []
    if what == "column":
        return  # a list of lines has none: encode says that first
    before = content(recipe)
    with pytest.raises(UserError, match="was made from something else"):
        fewstep.encode(recipe, model=model)
    assert content(recipe) == before
    fewstep.encode(recipe, model=model, overwrite=True)
    recipe.data.check(model.encoding())
    assert recipe.data.load() is not None


def test_what_was_only_touched_moved_or_removed_has_not_changed(
    data_recipe, prompts, tmp_path
) -> None:
    weights = tmp_path / "weights.bin"
    weights.write_bytes(b"first")
    recipe, model = data_recipe("prompts", prompts), DoubleModel(weights=weights)
    fewstep.encode(recipe, model=model)
    os.utime(prompts, (1, 1))
    os.utime(weights, (1, 1))
    recipe.data.check(model.encoding())
    assert fewstep.encode(recipe, model=model).made == 0
    prompts.unlink()
    weights.rename(tmp_path / "elsewhere.bin")
    moved = DoubleModel(weights=tmp_path / "elsewhere.bin")
    recipe.data.check(moved.encoding())


def test_encoders_that_are_new_or_gone_beside_others_have_changed(
    data_recipe, prompts, tmp_path
) -> None:
    files = {name: tmp_path / name for name in ("one", "two", "vae")}
    for name, file in files.items():
        file.write_text(name)
    recipe, model = data_recipe("prompts", prompts), DoubleModel()
    model.files = files
    fewstep.encode(recipe, model=model)

    def look(*names: str) -> None:
        recipe.data.check(Encoding({"salt": ""}, {name: files[name] for name in names}))

    def use(*names: str) -> None:
        there = Encoding({"salt": ""}, {name: files[name] for name in names})
        recipe.data.check_encoders(there, "--prompt")

    look("one", "two", "vae")
    use("one", "two")
    look("vae")  # a machine that only trains
    with pytest.raises(UserError, match=r"--prompt: the encoders .* \(one is gone, two is gone\)"):
        use("vae")
    look("one", "two")
    with pytest.raises(UserError, match=r"encoders\.two: is gone, and others are not"):
        look("one", "vae")
    files["three"] = tmp_path / "three"
    files["three"].write_text("three")
    with pytest.raises(UserError, match=r"encoders\.three: is new"):
        look("one", "two", "three", "vae")
    with pytest.raises(UserError, match=r"--prompt: .* \(three is new\); put them back"):
        use("one", "two", "three")
    shutil.rmtree(recipe.data.directory)
    use("one", "two", "three")  # nothing is known any more


def test_an_encoding_that_was_stopped_is_not_mixed_with_another(
    data_recipe, prompts, tmp_path, monkeypatch
) -> None:
    recipe, model = data_recipe("prompts", prompts), DoubleModel()
    calls = []

    def stop_after_one(done: float, total: int) -> None:
        calls.append((done, total))
        if done > 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fewstep.encode(recipe, model=model, on_progress=stop_after_one)
    assert (calls[0], calls[-1][1]) == ((0, 5), 5)
    with pytest.raises(UserError, match=r"model.salt: was '', is 'x'"):
        fewstep.encode(recipe, model=DoubleModel("x"))
    with pytest.raises(UserError, match=r"computed.shard_items: was 2, is 3"):
        fewstep.encode(data_recipe("prompts", prompts, shard_items=3), model=model)
    assert fewstep.encode(recipe, model=model).made == 2


@pytest.mark.parametrize("overwrite", [False, True])
def test_an_encoding_that_was_killed_at_its_first_write_goes_on(
    data_recipe, prompts, tmp_path, overwrite: bool
) -> None:
    (tmp_path / "encoded").mkdir()
    for name in (".lock", ".unfinished.json.tmp"):
        (tmp_path / "encoded" / name).write_text("half")
    recipe = data_recipe("prompts", prompts)
    encoded = fewstep.encode(recipe, model=DoubleModel(), overwrite=overwrite)
    assert encoded.items == {"train": 5}
    assert all(name[0] != "." for name in content(recipe))


def test_a_directory_of_something_else_is_left_alone(data_recipe, prompts, tmp_path) -> None:
    (tmp_path / "encoded").mkdir()
    (tmp_path / "encoded" / "train-00000.safetensors").write_text("precious")
    for overwrite in (False, True):
        with pytest.raises(UserError, match=r"encoded holds something that is no encoded data"):
            fewstep.encode(
                data_recipe("prompts", prompts), model=DoubleModel(), overwrite=overwrite
            )
    assert (tmp_path / "encoded" / "train-00000.safetensors").read_text() == "precious"


@pytest.mark.parametrize("place", [".", "encoded", "../link/deep/encoded"])
def test_encoded_data_do_not_go_into_their_source(data_recipe, images, place: str) -> None:
    (images.parent / "link").symlink_to(images)
    before = sorted(images.iterdir())
    recipe = data_recipe("images", images, encoded=str(images / place))
    with pytest.raises(UserError, match=r"data.encoded: .* lies in .*images, .* outside"):
        fewstep.encode(recipe, model=DoubleModel())
    assert sorted(images.iterdir()) == before
    beside = data_recipe("images", images, encoded=str(images) + "-encoded")
    assert fewstep.encode(beside, model=DoubleModel()).items == {"train": 5}


OTHER = {
    "checkpoint": {"version": 1, "files": {"weights-0.safetensors": {}}},
    "list": ["plan"],
    "plan": {"plan": {"version": 1}, "items": 0, "splits": {}, "files": {}, "skipped": []},
}


@pytest.mark.parametrize("kind", [*OTHER, "damaged"])
@pytest.mark.parametrize("name", ["manifest.json", "unfinished.json"])
def test_a_directory_with_a_manifest_of_something_else_is_left_alone(
    data_recipe, prompts, kind: str, name: str
) -> None:
    recipe = data_recipe("prompts", prompts)
    recipe.data.directory.mkdir()
    text = json.dumps(OTHER[kind]) if kind in OTHER else "{"
    (recipe.data.directory / name).write_text(text)
    (recipe.data.directory / "weights-0.safetensors").write_text("precious")
    (recipe.data.directory / "my-notes.json").write_text("precious")
    before, told = content(recipe), "damaged" if kind == "damaged" else "encoded: .* is no encoded"
    for overwrite in (False, True):
        with pytest.raises(UserError, match=told):
            fewstep.encode(recipe, model=DoubleModel(), overwrite=overwrite)
    with pytest.raises(UserError, match=told if name == "manifest.json" else "no complete encod"):
        fewstep.train(recipe, model=DoubleModel())
    assert content(recipe) == before


def test_encoding_anew_removes_what_it_has_written_and_no_more(data_recipe, prompts) -> None:
    fewstep.encode(data_recipe("prompts", prompts), model=DoubleModel())
    larger = data_recipe("prompts", prompts, shard_items=4)
    own = {"my-notes.json": b"a", "weights-0.safetensors": b"b", ".x.tmp": b"c"}
    for name, precious in own.items():
        (larger.data.directory / name).write_bytes(precious)
    fewstep.encode(larger, model=DoubleModel(), overwrite=True)
    found = content(larger)
    assert {name: found.pop(name) for name in own} == own
    shards = {"train-00000.safetensors", "train-00001.safetensors"}
    assert found.keys() == {*shards, "none.safetensors", "manifest.json"}


def test_unfinished_data_are_removed_as_well(data_recipe, prompts) -> None:
    def stop(done: float, total: int) -> None:
        if done > 2:
            raise KeyboardInterrupt

    recipe = data_recipe("prompts", prompts)
    with pytest.raises(KeyboardInterrupt):
        fewstep.encode(recipe, model=DoubleModel(), on_progress=stop)
    assert "train-00000.json" in content(recipe)
    larger = data_recipe("prompts", prompts, shard_items=9)
    fewstep.encode(larger, model=DoubleModel(), overwrite=True)
    assert content(larger).keys() == {
        "train-00000.safetensors",
        "none.safetensors",
        "manifest.json",
    }


@pytest.mark.parametrize("what", ["bad", "all", "gone", "encoder"])
def test_what_fails_beforehand_costs_no_data(data_recipe, prompts, what: str) -> None:
    recipe, model = data_recipe("prompts", prompts), DoubleModel()
    fewstep.encode(recipe, model=model)
    before = content(recipe)
    if what == "bad":
        recipe = data_recipe("prompts", prompts, on_bad="error")
        prompts.write_text("one\n\nthree\n")
    elif what == "all":
        prompts.write_text("\n\n")
    elif what == "gone":
        prompts.unlink()
    else:
        model.encoder.encode = lambda prompts: {"text": torch.full((len(prompts), 1), torch.nan)}
    with pytest.raises(UserError):
        fewstep.encode(recipe, model=model, overwrite=True)
    assert content(recipe) == before


def test_encoders_that_do_not_fit_are_named(data_recipe, images) -> None:
    recipe = data_recipe("images", images, image_size=12)
    with pytest.raises(UserError, match=r"data.image_size: images of 12 x 12 pixels become samp"):
        fewstep.encode(recipe, model=DoubleModel())
    recipe = data_recipe("images", images, dtype="float16")
    model = DoubleModel()
    model.encoder.encode = lambda prompts: {"text": torch.full((len(prompts), 1), 1e6)}
    with pytest.raises(UserError, match=r"data.dtype: 'text' of the prompt '' is not finite in fl"):
        fewstep.encode(recipe, model=model, overwrite=True)


def test_pixels_are_samples_where_there_is_no_autoencoder(data_recipe, images) -> None:
    recipe = data_recipe("images", images)
    fewstep.encode(recipe, model=DoubleModel(latent=False, sample_shape=(1, 6, 4)))
    assert recipe.data.load().x0(torch.arange(2)).shape == (2, 1, 6, 4)


def test_a_run_trains_on_images_with_captions(data_recipe, images) -> None:
    recipe = data_recipe("images", images, method="flow_matching")
    with pytest.raises(UserError, match=r"make it with `fewstep encode` and the same recipe"):
        fewstep.train(recipe, model=DoubleModel())
    fewstep.encode(recipe, model=DoubleModel())
    run = fewstep.train(recipe, model=DoubleModel())
    assert run.complete
    assert run.roles["student"].successful == recipe.train.cycles
    none = DoubleEncoder().encode([""])["text"][0]
    assert torch.equal(run.roles.model.none["text"], none)


def test_a_network_without_prompts_says_so(data_recipe, prompts, fewstep, tmp_path) -> None:
    recipe = data_recipe("prompts", prompts)
    values = recipe.model_dump(mode="json") | {"model": {"family": "mixture"}}
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps(values))
    code, _, err = fewstep("encode", file, "method.guidance=1.0")
    assert (code, "takes no prompts" in err) == (2, True)
    file.write_text(json.dumps(values | {"data": {"name": "none"}}))
    code, _, err = fewstep("encode", file, "method.guidance=1.0")
    assert (code, "data.name: 'none' needs no encoding" in err) == (2, True)
