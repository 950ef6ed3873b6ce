"""The report in a real browser: it renders without errors and fits a narrow screen."""

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from fewstep.report import ReportRun, write_report
from fewstep.training.timeline import Span, Timeline

webdriver = pytest.importorskip("selenium.webdriver")
from selenium.webdriver.chrome.service import Service  # noqa: E402

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")

pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="needs chromium and chromedriver on PATH"
)

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)


def teacher_lines(noise: np.random.Generator) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = [
        {
            "series": "student",
            "cycle": step,
            "step": step,
            "time": step * 0.05,
            "loss": (0.11 + 1.1 * math.exp(-step / 180)) * float(noise.lognormal(0, 0.08)),
            "grad_norm": (0.15 + math.exp(-step / 200)) * float(noise.lognormal(0, 0.3)),
            "lr": 1e-3,
        }
        for step in range(1, 2001)
    ]
    return [*lines, {"series": "run", "cycle": 2000, "seconds_per_cycle": 0.051}]


def student_lines(noise: np.random.Generator) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = [
        {"series": "reference", "sample_mean": -0.39, "sample_std": 0.74, "sample_variance": 0.531}
    ]
    step = 0
    for cycle in range(1, 401):
        gone = 1 - math.exp(-cycle / 60)
        for _ in range(5):
            step += 1
            fake = {"loss": 0.19 - 0.05 * gone, "grad_norm": 0.4 - 0.2 * gone}
            jitter = {key: value * float(noise.lognormal(0, 0.12)) for key, value in fake.items()}
            lines.append({"series": "fake_score", "cycle": cycle, "step": step, **jitter})
        student = {
            "loss": (0.45 - 0.1 * gone) * float(noise.lognormal(0, 0.1)),
            "grad_norm": (1.3 - 0.8 * gone) * float(noise.lognormal(0, 0.25)),
            "sample_mean": -0.52 + 0.13 * gone + float(noise.normal(0, 0.012)),
            "sample_std": 0.61 + 0.12 * gone + float(noise.normal(0, 0.01)),
            "sample_variance": 0.36 + 0.165 * gone + float(noise.normal(0, 0.012)),
        }
        lines.append({"series": "student", "cycle": cycle, "step": cycle, "lr": 1e-4, **student})
        if cycle % 25 == 0:
            distance = 3.1 + 30 * math.exp(-cycle / 45) + float(noise.normal(0, 0.25))
            accuracy = 0.965 - 0.4 * math.exp(-cycle / 50) + float(noise.normal(0, 0.006))
            lines.append(
                {
                    "series": "validation",
                    "cycle": cycle,
                    "frechet_distance": distance + (cycle > 325) * 0.8,
                    "class_accuracy": accuracy,
                }
            )
    message = "student update skipped: gradient norm is not finite"
    lines.append({"series": "warning", "cycle": 137, "message": message})
    lines.append({"series": "run", "cycle": 400, "seconds_per_cycle": 0.523})
    return lines


def evaluation() -> dict[str, Any]:
    def row(model: str, steps: int, nfe: int, distance: float, seconds: float) -> dict[str, Any]:
        worse = math.log(distance / 1.5)
        return {
            "model": model,
            "steps": steps,
            "nfe": nfe,
            "frechet_distance": distance,
            "kernel_distance": 0.0004 * distance**1.2,
            "precision": 0.93 - 0.08 * worse,
            "recall": 0.9 - 0.12 * worse,
            "density": 1.02 - 0.11 * worse,
            "coverage": 0.95 - 0.09 * worse,
            "class_accuracy": 0.985 - 0.03 * worse,
            "seconds": seconds,
        }

    return {
        "samples": 1000,
        "feature_space": "digit classifier",
        "results": [
            row("teacher", 1, 2, 118.0, 0.21),
            row("teacher", 2, 4, 61.2, 0.36),
            row("teacher", 4, 8, 19.7, 0.66),
            row("teacher", 8, 16, 6.4, 1.27),
            row("teacher", 50, 100, 2.48, 7.62),
            row("student", 1, 1, 8.3, 0.11),
            row("student", 2, 2, 4.4, 0.19),
            row("student", 4, 4, 3.12, 0.34),
            row("student_shared", 4, 4, 4.05, 0.39),
        ],
        "floor": {"frechet_distance": 1.31, "kernel_distance": 0.0003, "precision": 0.951}
        | {"recall": 0.947, "density": 1.004, "coverage": 0.972, "class_accuracy": 0.991},
    }


def timeline_lines(file: Path) -> list[dict[str, Any]]:
    """Write a timeline of six cycles on two ranks; what the series "timing" says of them."""
    timeline = Timeline(file)
    lines = []
    for cycle in range(395, 401):
        start = 1_764_453_600.0 + 0.5 * cycle
        for rank in range(2):
            timeline.extend(
                [
                    Span("rollout", f"rollout/{rank}", "rollout", cycle, start, 0.1),
                    Span("fake_score/0", f"critic/{rank}", "train", cycle, start + 0.1, 0.2),
                    Span("score", f"critic/{rank}", "score", cycle, start + 0.3, 0.08),
                    Span(
                        "hand_off", f"critic/{rank}", "hand_off", cycle, start + 0.38, 0.01, 65536
                    ),
                    Span("student", f"actor/{rank}", "train", cycle, start + 0.39, 0.1),
                ]
            )
        values = timeline.cycle_values(cycle)
        lines.append({"series": "timing", "cycle": cycle, "step": cycle, **values})
    timeline.write()
    return lines


RECIPE = """\
seed: 0
method:
  name: dmd2
  fake_updates_per_student: 5
  student_sigmas: [1.0, 0.9, 0.75, 0.5]
roles:
  student: {storage: independent, learning_rate: 1.0e-4}
  fake_score: {storage: independent, learning_rate: 1.0e-4}
# a line much longer than a narrow screen is wide: it has to scroll in its own box, not the page
"""


def digit_grid() -> dict[str, torch.Tensor]:
    data = load_digits()
    noise = torch.Generator().manual_seed(0)
    clean = {}
    for row, label in enumerate(
        ("teacher, 50 steps", "teacher, 4 steps", "student, 4 steps", "student_shared, 4 steps")
    ):
        picks = [np.flatnonzero(data.target == digit)[3 + row] for digit in range(10)]
        images = torch.from_numpy(data.images[picks]).float()[:, None] / 8 - 1
        amount = 0.45 if label == "teacher, 4 steps" else 0.05
        clean[label] = images + amount * torch.randn(images.shape, generator=noise)
    return clean


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("digits")
    noise = np.random.default_rng(0)
    students = {"student": student_lines(noise), "student_shared": student_lines(noise)}
    runs = []
    for name, lines in {"teacher": teacher_lines(noise), **students}.items():
        (root / name).mkdir()
        if name == "student":
            lines = lines + timeline_lines(root / name / "timeline.json")
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (root / name / "metrics.jsonl").write_text(text)
        (root / name / "recipe.yaml").write_text(RECIPE)
        runs.append(ReportRun(name, root / name))
    written = write_report(
        root,
        title="Handwritten digits in four steps",
        runs=runs,
        evaluation=evaluation(),
        grids={"comparison": digit_grid()},
        labels=[str(digit) for digit in range(10)],
    )
    return written[0]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


def open_page(browser: Any, page: Path, width: int, scheme: str = "light") -> None:
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    browser.get(page.as_uri())
    browser.execute_async_script(
        "const done = arguments[0];"
        "Promise.all([...document.images].map(i => i.decode())).then(() => done(), done)"
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_images_are_shown_without_an_error_or_a_request(
    browser: Any, report: Path, scheme: str
) -> None:
    browser.get_log("browser"), browser.get_log("performance")
    open_page(browser, report, 1200, scheme)
    images = browser.execute_script(
        "return [...document.images].map(i => {const b = i.getBoundingClientRect();"
        "return [i.complete, i.naturalWidth, b.width, b.height, i.alt.length,"
        " i.currentSrc === i.src]})"
    )
    assert len(images) == 2 + 2 + 4 + 1 + 4
    for complete, natural, width, height, alt, is_light in images:
        assert complete
        assert natural > 0
        assert width > 100
        assert height > 100
        assert alt > 10
        assert is_light == (scheme == "light")
    assert browser.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    requested = [
        event["params"]["request"]["url"]
        for event in events
        if event["method"] == "Network.requestWillBeSent"
    ]
    assert [url for url in requested if not url.startswith("data:")] == [report.as_uri()]


@pytest.mark.parametrize("width", [360, 768, 1200])
def test_page_does_not_scroll_sideways(browser: Any, report: Path, width: int) -> None:
    open_page(browser, report, width)
    browser.execute_script("for (const d of document.querySelectorAll('details')) d.open = true")
    inner, scrolled, size = browser.execute_script(
        "return [innerWidth, document.documentElement.scrollWidth,"
        " parseFloat(getComputedStyle(document.body).fontSize)]"
    )
    assert inner == width
    assert scrolled <= inner
    assert size >= 14


def test_wide_content_scrolls_in_its_own_box(browser: Any, report: Path) -> None:
    open_page(browser, report, 360)
    boxes = browser.execute_script(
        "return [...document.querySelectorAll('.card:not(.narrow) > .scroll')]"
        ".map(b => [b.clientWidth, b.scrollWidth,"
        " getComputedStyle(b).overflowX])"
    )
    assert len(boxes) == 4
    for inner, content, overflow in boxes:
        assert inner < 360 < content
        assert overflow == "auto"


def test_small_text_stays_readable(browser: Any, report: Path) -> None:
    open_page(browser, report, 360)
    smallest = browser.execute_script(
        "const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);"
        "let least = 99; while (walk.nextNode()) if (walk.currentNode.data.trim())"
        " least = Math.min(least, parseFloat(getComputedStyle(walk.currentNode.parentElement)"
        ".fontSize)); return least"
    )
    assert smallest >= 12.9
