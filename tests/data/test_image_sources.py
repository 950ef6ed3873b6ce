"""Images with captions: folders and shards, and what becomes of a picture."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from test_prompts import write_tar
from torch import Tensor
from torch.nn.functional import interpolate

from fewstep.data.images import decode_image, read_images
from fewstep.errors import UserError

WHITE = (255, 255, 255)


def encoded(picture: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, kind, **options)
    return stream.getvalue()


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def decode(content: bytes, height: int = 4, width: int = 4, mode: str = "RGB") -> Tensor:
    return decode_image(content, height, width, WHITE, mode)


def colour(red: float, green: float, blue: float) -> Tensor:
    return torch.tensor([red, green, blue]) / 127.5 - 1


def found(folder: Path, column: str | None = None) -> list[tuple[str, str | None]]:
    records = read_images([str(folder)], column)
    return [(Path(each.where).name, each.fault() or each.text) for each in records]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Images in two levels; one is no image."""
    (tmp_path / "in" / "deep").mkdir(parents=True)
    for name in ("b.png", "a.JPG", "deep/c.webp"):
        picture(5, 5).save(tmp_path / "in" / name)
    (tmp_path / "in" / "notes.md").write_text("no image")
    return tmp_path / "in"


def test_captions_beside_images(folder: Path) -> None:
    (folder / "a.txt").write_text(" of a \n")
    (folder / "deep" / "c.txt").write_text("of c")
    assert found(folder) == [("a.JPG", "of a"), ("b.png", "there is no b.txt"), ("c.webp", "of c")]
    with pytest.raises(UserError, match=r"data.column: 'text' is given, but .* has neither"):
        found(folder, "text")


def test_captions_in_metadata(folder: Path) -> None:
    rows = [
        {"file_name": "deep/c.webp", "text": "of c"},
        {"file_name": "a.JPG", "text": "of a"},
        {"file_name": "gone.png", "text": "of none"},
        {"file_name": "a.JPG", "text": "again"},
    ]
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert found(folder) == [
        ("c.webp", "of c"),
        ("a.JPG", "of a"),
        ("metadata.jsonl:3", "there is no image 'gone.png'"),
        ("metadata.jsonl:4", "a.JPG is listed twice"),
        ("b.png", "it is not in metadata.jsonl"),
    ]
    with pytest.raises(UserError, match=r"no column 'caption'; it has 'file_name', 'text'"):
        found(folder, "caption")
    (folder / "metadata.csv").write_text('file_name,text\nb.png,"one, two"\n')
    with pytest.raises(UserError, match="which one counts"):
        found(folder)
    (folder / "metadata.jsonl").unlink()
    assert found(folder)[0] == ("b.png", "one, two")


def test_shards_of_images(tmp_path: Path) -> None:
    one, two = picture(6, 6, 1), picture(6, 6, 2)
    file = write_tar(
        tmp_path / "x.tar",
        {
            "0.png": encoded(one),
            "0.txt": b"one",
            "1.cls": b"3",
            "1.txt": b"no image",
            "2.json": b'{"caption": "two"}',
            "2.png": encoded(two),
        },
    )
    without = "there is no image: its members are .cls, .txt"
    assert [text for _, text in found(file)] == ["one", without, "there is no .txt"]
    record = read_images([str(file)], "caption")[2]
    assert record.text == "two"
    assert torch.equal(decode(record.image.read(), 6, 6), decode(encoded(two), 6, 6))


def test_what_holds_no_images_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is empty: there is no image in it"):
        found(tmp_path)
    (tmp_path / "p.txt").touch()
    with pytest.raises(UserError, match=r"p.txt is neither a folder of images nor a .tar"):
        found(tmp_path / "p.txt")


def test_pixels_keep_their_values_and_places() -> None:
    image = picture(4, 4)
    expected = torch.tensor(np.asarray(image)).permute(2, 0, 1) / 127.5 - 1
    assert torch.equal(decode(encoded(image)), expected)
    assert decode(encoded(image), mode="L").shape == (1, 4, 4)


@pytest.mark.parametrize(("width", "height"), [(12, 8), (8, 12), (3, 6)])
def test_the_shorter_side_is_fitted_and_the_middle_kept(width: int, height: int) -> None:
    # A ramp along the longer side: its middle is what stays, whatever the filter.
    ramp = np.linspace(0, 255, max(width, height)).round().astype(np.uint8)
    values = np.tile(ramp, (height, 1)) if width > height else np.tile(ramp[:, None], (1, width))
    out = decode(encoded(Image.fromarray(np.stack([values] * 3, -1))), 4, 4)
    assert out.shape == (3, 4, 4)
    assert abs(float(out.mean())) < 0.06
    along = out[0].mean(0) if width > height else out[0].mean(1)
    share = min(width, height) / max(width, height)
    assert float(along[-1] - along[0]) == pytest.approx(2 * share * 3 / 4, abs=0.3)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("length", [4000, 4001])
def test_strips_are_cut_before_they_are_resized(monkeypatch, length: int, turned: bool) -> None:
    # Along the strip brightness rises by 8 a pixel around its middle, which 2 pixels' worth show.
    values = (127.5 + 8 * (np.arange(length) - (length - 1) / 2)).clip(0, 255).astype(np.uint8)
    strip = np.tile(values, (2, 1))
    content = encoded(Image.fromarray(np.stack([strip.T if turned else strip] * 3, -1)))
    sizes = []
    resize = Image.Image.resize
    monkeypatch.setattr(
        Image.Image, "resize", lambda self, size, *a: sizes.append(size) or resize(self, size, *a)
    )
    out = decode(content, 64, 64)
    assert max(sizes[0]) <= 64 * 9
    along = out[0].mean(1 if turned else 0)
    assert float(out[0].std(0 if not turned else 1).max()) < 1e-3
    assert float(along[31] + along[32]) / 2 == pytest.approx(0, abs=0.01)
    assert float(along[63] - along[0]) == pytest.approx(2 * 8 / 127.5, abs=0.03)


def test_pictures_of_ordinary_sides_are_resized_as_a_whole() -> None:
    image = picture(70, 10)
    whole = image.resize((28, 4), Image.Resampling.LANCZOS).crop((12, 0, 16, 4))
    assert torch.equal(decode(encoded(image)), decode(encoded(whole)))


@pytest.mark.parametrize("where", ["open", "resize"])
def test_what_is_too_large_is_said(monkeypatch, where: str) -> None:
    def no_room(*_: object) -> None:
        raise MemoryError

    content = encoded(picture(9, 9))
    monkeypatch.setattr(*((Image, "open") if where == "open" else (Image.Image, "resize")), no_room)
    with pytest.raises(ValueError, match="cannot be read: it is too large for the memory"):
        decode(content)


def test_decompression_bombs_are_bad_images(monkeypatch) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 30)
    with pytest.raises(ValueError, match=r"cannot be read: Image size .* could be decompression"):
        decode(encoded(picture(9, 9)))


def test_resizing_is_antialiased() -> None:
    # A checkerboard of single pixels is grey from afar; unfiltered it would be black or white.
    board = np.indices((64, 64)).sum(0) % 2 * 255
    image = Image.fromarray(board.astype(np.uint8)).convert("RGB")
    assert float(decode(encoded(image), 8, 8).abs().max()) < 0.1
    smooth = picture(64, 64).resize((16, 16), Image.Resampling.BOX).resize((64, 64))
    own = decode(encoded(smooth), 16, 16)
    reference = interpolate(
        decode(encoded(smooth), 64, 64)[None], 16, mode="bicubic", antialias=True
    )
    assert float((own - reference[0]).abs().mean()) < 0.02


def test_photographs_are_turned_upright() -> None:
    image = Image.new("RGB", (4, 2), "blue")
    image.putpixel((0, 0), (255, 0, 0))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise by a quarter
    upright = decode(encoded(image, exif=exif), 4, 2)
    assert torch.equal(upright[:, 0, 1], colour(255, 0, 0))
    assert torch.equal(upright[:, 3, 0], colour(0, 0, 255))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_what_is_transparent_shows_the_background(mode: str) -> None:
    image = Image.new("RGBA", (4, 4), (0, 0, 0, 0))
    content = encoded(image.quantize() if mode == "P" else image.convert(mode))
    out = decode_image(content, 4, 4, (10, 20, 30), "RGB")
    assert torch.allclose(out[:, 2, 2], colour(10, 20, 30))
    half = encoded(Image.new("RGBA", (4, 4), (255, 0, 0, 128)))
    assert torch.allclose(decode(half)[:, 0, 0], colour(255, 127, 127), atol=0.01)


def test_sixteen_bits_keep_their_range() -> None:
    values = np.linspace(0, 65535, 16).reshape(4, 4).astype(np.uint16)
    out = decode(encoded(Image.fromarray(values)))
    assert torch.allclose(out[0].flatten(), torch.linspace(-1, 1, 16), atol=0.005)
    content = encoded(Image.fromarray(values), transparency=int(values[0, 1]))
    out = decode_image(content, 4, 4, (10, 20, 30), "RGB")
    assert torch.allclose(out[:, 0, 1], colour(10, 20, 30))
    assert torch.allclose(out[0, 0, 2], torch.tensor(4 / 15 - 1), atol=0.005)


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_pixels_of_no_known_range_are_refused(dtype: type) -> None:
    image = Image.fromarray(np.arange(64, dtype=dtype).reshape(8, 8))
    with pytest.raises(ValueError, match="whose range is not known"):
        decode(encoded(image, "TIFF"))


def test_cmyk_and_grey_become_red_green_and_blue() -> None:
    for mode in ("CMYK", "L"):
        content = encoded(Image.new("RGB", (8, 8), "white").convert(mode), "JPEG")
        assert torch.allclose(decode(content), torch.ones(3, 4, 4), atol=0.02)


@pytest.mark.parametrize(
    "content", [b"", b"no image at all", encoded(picture(64, 64), "JPEG")[:900]]
)
def test_what_cannot_be_decoded_is_said(content: bytes) -> None:
    with pytest.raises(ValueError, match="the image cannot be read"):
        decode(content)
