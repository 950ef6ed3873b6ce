"""The report: self-contained, escaped, and unshaken by what a broken run leaves behind."""

import base64
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import pytest
import torch
from PIL import Image

from fewstep.figures.curves import smooth
from fewstep.figures.grid import MAX_COLUMNS, MAX_TILE_PIXELS, TILE_PIXELS, grid_picture
from fewstep.figures.theme import PIXEL_RATIO
from fewstep.report import ReportRun, read_metrics, write_report
from fewstep.report_data import distinct_runs

EVALUATION: dict[str, Any] = {
    "samples": 500,
    "results": [
        {"model": "teacher", "steps": 4, "nfe": 8, "frechet_distance": 20.0, "seconds": 0.8},
        {"model": "teacher", "steps": 50, "nfe": 100, "frechet_distance": 2.5, "seconds": 10.0},
        {"model": "student", "steps": 1, "nfe": 1, "frechet_distance": 9.0, "seconds": 0.1},
        {"model": "student", "steps": 4, "nfe": 4, "frechet_distance": 3.0, "seconds": 0.4},
        {"model": "student_shared", "steps": 4, "nfe": 4, "frechet_distance": None},
    ],
    "floor": {"frechet_distance": 1.25, "class_accuracy": 0.99},
}


class Page(HTMLParser):
    """Collects the tags of a page and checks that they nest."""

    VOID = frozenset({"meta", "link", "img", "source", "br"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def find(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def words(self) -> str:
        return " ".join(" ".join(self.text).split())


def make_run(root: Path, name: str, text: str, recipe: str | None = "seed: 0\n") -> ReportRun:
    (root / name).mkdir(parents=True)
    (root / name / "metrics.jsonl").write_text(text)
    if recipe is not None:
        (root / name / "recipe.yaml").write_text(recipe)
    return ReportRun(name, root / name)


def healthy(cycles: int = 60) -> str:
    lines: list[dict[str, Any]] = [
        {"series": "reference", "sample_mean": -0.4, "sample_std": 0.7, "sample_variance": 0.5}
    ]
    for cycle in range(1, cycles + 1):
        fake = {"series": "fake_score", "cycle": cycle, "loss": 0.3, "grad_norm": 0.5}
        student = {"series": "student", "cycle": cycle, "loss": 1 / cycle, "grad_norm": 1.0}
        sample = {"sample_mean": -0.5, "sample_std": 0.6, "sample_variance": 0.4}
        lines += [fake, fake, student | sample]
        if cycle % 20 == 0:
            distance = abs(cycle - 40) + 2.0
            lines.append({"series": "validation", "cycle": cycle, "frechet_distance": distance})
    return "".join(json.dumps(line) + "\n" for line in lines)


def report(out: Path, *runs: ReportRun, **changes: Any) -> Page:
    arguments: dict[str, Any] = {"title": "A run", "evaluation": None, "grids": {}, "labels": []}
    written = write_report(out, runs=runs, **(arguments | changes))
    assert written[0] == out / "report.html"
    return Page(written[0].read_text(encoding="utf-8"))


def pixels(png: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("project")
    rows = {
        "teacher, 50 steps": torch.zeros(3, 1, 8, 8),
        "student, 4 steps": torch.ones(3, 1, 8, 8),
    }
    report(
        root,
        make_run(root, "student", healthy()),
        evaluation=EVALUATION,
        grids={"comparison": rows},
        labels=["0", "1", "2"],
    )
    return root


def test_files_have_the_promised_names(full: Path) -> None:
    names = {path.name for path in full.iterdir() if path.is_file()}
    assert names == {
        "report.html",
        "comparison.png",
        "quality.png",
        "student_loss.png",
        "student_gradient_norm.png",
        "student_latents.png",
        "student_validation.png",
    }


def test_page_is_self_contained(full: Path) -> None:
    text = (full / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    addresses = [
        value
        for _, attributes in page.tags
        for key, value in attributes.items()
        if key in ("src", "srcset", "href", "action", "data") and value
    ]
    assert all(address.startswith(("data:", "#")) for address in addresses)
    assert not re.search(r"https?://|@import|url\(", text)
    assert page.find("script") == []
    assert "\x00" not in text


def test_every_picture_is_an_embedded_png_of_its_stated_size(full: Path) -> None:
    page = Page((full / "report.html").read_text(encoding="utf-8"))
    images, dark = page.find("img"), page.find("source")
    assert len(images) == len(dark) == 6
    addresses = [image["src"] for image in images] + [source["srcset"] for source in dark]
    sizes = [(int(image["width"] or 0), int(image["height"] or 0)) for image in images] * 2
    for address, (width, height) in zip(addresses, sizes, strict=True):
        assert address is not None
        kind, _, data = address.partition(",")
        assert kind == "data:image/png;base64"
        picture = Image.open(io.BytesIO(base64.b64decode(data, validate=True)))
        picture.load()
        assert picture.format == "PNG"
        assert picture.size == (width * PIXEL_RATIO, height * PIXEL_RATIO)
        assert min(picture.size) > 100
        assert len(np.unique(np.asarray(picture.convert("L")))) > 10
    assert (full / "comparison.png").read_bytes() == base64.b64decode(
        (images[0]["src"] or "").partition(",")[2]
    )


def test_page_is_accessible(full: Path) -> None:
    page = Page((full / "report.html").read_text(encoding="utf-8"))
    assert page.find("html")[0]["lang"] == "en"
    assert any(meta.get("name") == "viewport" for meta in page.find("meta"))
    assert len(page.find("h1")) == 1
    alts = [image["alt"] or "" for image in page.find("img")]
    assert all(len(alt) > 20 for alt in alts)
    assert "student, 4 steps" in alts[0]
    named = {value["aria-labelledby"] for value in page.find("section")}
    assert named <= {attributes.get("id") for _, attributes in page.tags}
    links = {(value["href"] or "")[1:] for value in page.find("a")}
    assert links <= {attributes.get("id") for _, attributes in page.tags}


def test_headline_compares_the_student_with_the_longest_teacher(full: Path) -> None:
    words = Page((full / "report.html").read_text(encoding="utf-8")).words
    assert "In 4 steps instead of the teacher's 50, the student samples 25 times as fast" in words
    assert "its Fréchet distance is 1.2 times the teacher's" in words
    assert "the teacher's Fréchet distance in 4 steps 20 3 for the student" in words
    assert "samples: 500" in words


def test_table_holds_every_result_and_the_floor(full: Path) -> None:
    text = (full / "report.html").read_text(encoding="utf-8")
    table = text[text.index("<table>") : text.index("</table>")]
    body, foot = table.split("<tfoot>")
    assert body.count('<th scope="row">') == 5
    assert foot.count('<th scope="row">') == 1
    assert "1.25" in foot
    assert "0.990" in foot
    last = body[body.index("student_shared") :]
    assert "<td>–</td>" in last


def test_held_out_prompts_have_a_table_and_grids_labels_of_their_own(tmp_path: Path) -> None:
    held_out = [{"model": "student", "steps": 4, "nfe": 4, "frechet_distance": 7.125}]
    rows = {"student, 4 steps": torch.zeros(2, 1, 8, 8)}
    page = report(
        tmp_path,
        evaluation={**EVALUATION, "held_out": held_out},
        grids={"seen": rows, "held out": rows},
        labels={"seen": ["cat", "dog"], "held out": ["fish", "bird"]},
    )
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    first, second = re.findall(r"<table>.*?</table>", text, re.DOTALL)
    assert ("7.12" in first, "7.12" in second) == (False, True)
    assert ("<tfoot>" in first, "<tfoot>" in second) == (True, False)
    assert "Prompts that were held out" in page.words
    alts = [image["alt"] or "" for image in page.find("img")]
    assert [alt.partition("Columns: ")[2] for alt in alts[:2]] == ["cat, dog.", "fish, bird."]


def test_text_from_outside_is_escaped(tmp_path: Path) -> None:
    evil = "</pre><script>alert(1)</script>"
    warning = json.dumps({"series": "warning", "cycle": 3, "message": evil}) + "\n"
    run = make_run(tmp_path, "student", warning, recipe=f"note: '{evil}'\n")
    page = report(
        tmp_path,
        ReportRun(evil, run.path),
        title=evil,
        evaluation={evil: evil, "results": [{"model": evil, "nfe": 1, "frechet_distance": 1.0}]},
        grids={"comparison": {evil: torch.zeros(1, 3, 8, 8)}},
        labels=[evil],
    )
    assert page.find("script") == []
    assert page.words.count(evil) >= 6
    assert f"note: '{evil}'" in page.words


def test_broken_lines_do_not_break_the_report(tmp_path: Path) -> None:
    text = healthy(10)
    text += '{"series": "student", "cycle": 11, "loss": NaN, "grad_norm": Infinity}\n'
    text += '{"series": "student", "cycle": 12, "loss": null}\n'
    text += '{"series": "student"}\n\n[1, 2]\n"text"\n{"cycle": 3}\n{"series": "stud'
    page = report(tmp_path, make_run(tmp_path, "student", text, recipe=None))
    assert len(page.find("img")) == 3
    assert "4 lines of metrics.jsonl could not be read" in page.words
    assert "student loss is not finite in 2 of 12 steps" in page.words
    assert "No recipe.yaml was found." in page.words


@pytest.mark.parametrize("text", ["", "\n", "{", "\x00\xff"])
def test_run_without_metrics_says_so(tmp_path: Path, text: str) -> None:
    page = report(
        tmp_path, make_run(tmp_path, "student", text), ReportRun("gone", tmp_path / "gone")
    )
    assert page.find("img") == []
    assert page.words.count("No metrics were found for this run.") == 2
    assert "not been evaluated yet" in page.words


def test_supervised_run_has_no_fake_score(tmp_path: Path) -> None:
    lines = [{"series": "student", "cycle": c, "loss": 1 / c, "lr": 1e-3} for c in range(1, 30)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    page = report(tmp_path, make_run(tmp_path, "teacher", text))
    assert len(page.find("img")) == 1
    assert (tmp_path / "teacher_loss.png").is_file()
    assert "29 cycles final loss" in page.words


def test_warnings_are_visible_and_equal_ones_are_counted(tmp_path: Path) -> None:
    lines = [{"series": "warning", "cycle": c, "message": "update skipped"} for c in (3, 5, 9)]
    lines += [{"series": "warning", "cycle": 1, "message": f"odd {n}"} for n in range(9)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    page = report(tmp_path, make_run(tmp_path, "student", text))
    assert "10 warnings" in page.words
    assert "student: update skipped (3 times, cycles 3 to 9)" in page.words
    assert "odd 8" in page.words
    assert all("hidden" not in attributes for _, attributes in page.tags)


def test_page_without_warnings_has_no_warning_box(full: Path) -> None:
    page = Page((full / "report.html").read_text(encoding="utf-8"))
    assert not any(section.get("class") == "warnings" for section in page.find("section"))


def test_lines_overtaken_by_a_resumed_run_are_dropped(tmp_path: Path) -> None:
    lines = [{"series": "student", "cycle": c, "loss": c} for c in (1, 2, 3, 4, 3, 4, 5)]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    records, unreadable = read_metrics(path)
    assert unreadable == 0
    assert [r["cycle"] for r in records["student"]] == [1, 2, 3, 3, 4, 5]


def test_grid_shows_each_image_in_its_place() -> None:
    images = torch.full((3, 1, 8, 8), -1.0)
    images[1] = 1.0
    images[2, :, :4] = 0.0
    drawn = grid_picture("comparison", {"teacher, 50 steps": images}, ["0", "1", "2"])
    assert drawn is not None
    picture, labels = drawn
    assert labels == ["0", "1", "2"]
    grey = pixels(picture.dark)[..., 0]
    side = TILE_PIXELS // 8 * 8
    pitch = side + 12
    top, left = grey.shape[0] - pitch, grey.shape[1] - 3 * pitch
    tiles = [
        grey[top : top + side, left + i * pitch : left + i * pitch + side].astype(int)
        for i in range(3)
    ]
    assert (tiles[0] == 0).all()
    assert (tiles[1] == 255).all()
    assert (abs(tiles[2][: side // 2] - 127) <= 1).all()
    assert (tiles[2][side // 2 :] == 0).all()


def test_grid_keeps_colour_and_marks_pixels_that_are_not_finite() -> None:
    images = torch.full((1, 3, 8, 8), -1.0, dtype=torch.bfloat16, requires_grad=True)
    broken = torch.full((1, 1, 8, 8), torch.nan)
    green = images.detach().clone()
    green[:, 1] = 1.0
    drawn = grid_picture("g", {"a": images, "b": green, "c": broken}, [])
    assert drawn is not None
    colours, counts = np.unique(pixels(drawn[0].light).reshape(-1, 3), axis=0, return_counts=True)
    area = (TILE_PIXELS // 8 * 8) ** 2
    flat = {tuple(int(v) for v in c) for c, n in zip(colours, counts, strict=True) if n >= area}
    assert {(0, 0, 0), (0, 255, 0), (255, 0, 255)} <= flat


def test_large_and_uneven_grids_fit() -> None:
    rows = {"teacher": torch.rand(20, 3, 300, 400), "empty": torch.rand(0, 3, 8, 8)}
    drawn = grid_picture("g", rows | {"student": torch.rand(2, 3, 300, 400)}, ["x"] * 20)
    assert drawn is not None
    picture, labels = drawn
    assert len(labels) == MAX_COLUMNS
    assert "first 16 of 20" in picture.caption
    assert picture.width <= 16 * (MAX_TILE_PIXELS + 12) / 2 + 200


def test_grid_refuses_what_is_not_an_image(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'comparison', row 'teacher'.*\[2, 4, 8, 8\]"):
        report(tmp_path, grids={"comparison": {"teacher": torch.zeros(2, 4, 8, 8)}})
    assert list(tmp_path.iterdir()) == []


def test_two_pictures_cannot_share_a_file(tmp_path: Path) -> None:
    image = {"teacher": torch.zeros(1, 1, 8, 8)}
    with pytest.raises(ValueError, match="a_b"):
        report(tmp_path, grids={"a b": image, "a/b": image})


def test_running_mean_keeps_constants_and_reduces_noise() -> None:
    assert np.allclose(smooth(np.full(500, 3.0)), 3.0)
    noise = np.random.default_rng(0).normal(size=4000)
    assert smooth(noise).std() < 0.15
    assert np.allclose(smooth(noise[:5]), noise[:5])
    assert smooth(np.zeros(0)).shape == (0,)


def test_drawing_leaves_matplotlib_as_it_was(tmp_path: Path) -> None:
    before = dict(mpl.rcParams)
    report(tmp_path, make_run(tmp_path, "student", healthy(5)), evaluation=EVALUATION)
    assert dict(mpl.rcParams) == before


def test_writing_replaces_and_leaves_nothing_else(full: Path, tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text("old")
    report(tmp_path, title="new")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    assert "new" in (tmp_path / "report.html").read_text()
    assert not [path for path in full.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(
    "names",
    [("a b", "a_b"), ("数字", "手写"), ("a b", "a_b", "a_b_2", "a/b"), ("Run", "run")],
)
def test_names_that_would_share_a_file_are_numbered(tmp_path: Path, names: tuple[str, ...]) -> None:
    made = [make_run(tmp_path, str(i), healthy()) for i in range(len(names))]
    runs = distinct_runs((name, run.path) for name, run in zip(names, made, strict=True))
    page = report(tmp_path / "out", *runs)
    assert [run.name for run in runs] == list(names)
    ids = [attributes["id"] for attributes in page.find("h3") if "id" in attributes]
    assert len(set(ids)) == len(names)
    losses = list((tmp_path / "out").glob("*_loss.png"))
    assert len({file.name.lower() for file in losses}) == len(names)
