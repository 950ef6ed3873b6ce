"""Samples as files."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fewstep.errors import UserError
from fewstep.images import tile, to_picture, write_samples


def test_a_picture_shows_the_pixels_enlarged_without_smoothing() -> None:
    image = torch.tensor([[[-1.0, 1.0], [0.0, 2.0]]])
    pixels = np.asarray(to_picture(image, least_side=4))
    assert pixels.shape == (4, 4)
    assert pixels[::2, ::2].tolist() == [[0, 255], [128, 255]]
    assert (pixels[:2, :2] == 0).all()


def test_tiles_are_placed_row_by_row() -> None:
    samples = torch.arange(12.0).reshape(12, 1, 1, 1).expand(12, 3, 2, 2)
    grid = tile(samples, gap=1)
    assert grid.shape == (3, 3 * 3 - 1, 4 * 3 - 1)
    assert grid[0, 0::3, 0::3].tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_colour_images_are_written_in_colour(tmp_path: Path) -> None:
    samples = torch.full((1, 3, 64, 64), -1.0)
    samples[:, 0] = 1.0
    write_samples(samples, tmp_path / "red.png")
    with Image.open(tmp_path / "red.png") as picture:
        assert picture.getpixel((5, 5)) == (255, 0, 0)


def test_points_are_no_pictures(tmp_path: Path) -> None:
    points = torch.zeros(4, 2)
    with pytest.raises(UserError, match="safetensors"):
        write_samples(points, tmp_path / "points.png")
    assert "4 samples" in write_samples(points, tmp_path / "points.safetensors")


def test_a_place_that_cannot_be_written_is_an_error_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--out: .* cannot be made: .*file is a file"):
        write_samples(torch.zeros(1, 1, 8, 8), tmp_path / "file" / "grid.png")


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    samples = torch.zeros(2, 1, 8, 8)
    assert "2 images" in write_samples(samples, tmp_path / "new")
    with pytest.raises(UserError, match=r"--out .*new: is not empty; name a new folder"):
        write_samples(samples[:1], tmp_path / "new")
    (tmp_path / "empty").mkdir()
    write_samples(samples, tmp_path / "empty")
    assert [path.name for path in sorted((tmp_path / "empty").iterdir())] == [
        "00000.png", "00001.png",
    ]  # fmt: skip


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["grid.png", "tensor.safetensors", "folder"])
def test_samples_that_are_not_finite_are_refused(tmp_path: Path, name: str, value: float) -> None:
    samples = torch.zeros(2, 1, 8, 8)
    samples[1, 0, 3, 3] = value
    with pytest.raises(UserError, match="not finite"):
        write_samples(samples, tmp_path / "below" / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("shape", "name"), [((1, 1, 8, 8), "grid.jpg"), ((4, 2), "grid.png"), ((4, 2), "folder")]
)
def test_what_is_refused_makes_no_directory(
    tmp_path: Path, shape: tuple[int, ...], name: str
) -> None:
    with pytest.raises(UserError, match="--out"):
        write_samples(torch.zeros(shape), tmp_path / "below" / name)
    assert list(tmp_path.iterdir()) == []
