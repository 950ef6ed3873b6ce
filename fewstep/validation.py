"""Validation on a schedule, and the best student by the chosen metric."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, final

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fewstep.clip import ClipScore
from fewstep.data.conditions import conditions_in_turn
from fewstep.data.dataset import Dataset
from fewstep.data.items import Items
from fewstep.errors import UserError
from fewstep.evaluation import HIGHER_IS_BETTER, Evaluator
from fewstep.features import (
    ColourFeatures,
    FeatureNetwork,
    InceptionFeatures,
    RawFeatures,
    train_digit_classifier,
)
from fewstep.methods.method import SamplerSpec
from fewstep.models.model import Model
from fewstep.parallel.ranks import CPU, SINGLE, Ranks
from fewstep.roles.role import STUDENT, STUDENT_EMA, Roles
from fewstep.sampling import Samples, sample_role, samples_at_once
from fewstep.settings import Settings
from fewstep.training.metrics import Metrics, logger
from fewstep.training.phase import PhaseResult

FeatureKind = Literal["auto", "digits", "raw", "colours", "inception"]
# Numbers of an image that raw features are taken of, at most.
MOST_RAW = 4096


@final
class ValidationSettings(Settings):
    """How the student is judged while it is trained. Needs `data` to compare with."""

    every: Annotated[int, Field(gt=0)] = Field(100, description="cycles between validations")
    samples: Annotated[int, Field(ge=16)] = Field(500, description="student samples each time")
    batch_size: Annotated[int, Field(gt=0)] | None = Field(
        None, description="samples made at once; null: 256 small ones, fewer large ones"
    )
    seed: Annotated[int, Field(ge=0)] = Field(1, description="of the samples' noise")
    metric: (
        Literal[
            "frechet_distance",
            "kernel_distance",
            "precision",
            "recall",
            "density",
            "coverage",
            "class_accuracy",
            "clip_score",
        ]
        | None
    ) = Field(
        "frechet_distance", description="decides which student is the best; null: none is named"
    )
    features: FeatureKind = Field(
        "auto",
        description="what images are compared by; auto: the digits' classifier, colours at 8 by 8 "
        "of larger pictures, all numbers of anything else",
    )
    clip: str | None = Field(
        None,
        description="a CLIP model, as a directory or hub id, by which images are held against "
        "their prompts; left out with a warning where it cannot be loaded",
    )

    @model_validator(mode="after")
    def _check(self) -> ValidationSettings:
        if self.metric == "clip_score" and self.clip is None:
            raise ValueError("metric: 'clip_score' needs a CLIP model: set validation.clip")
        return self


# Real images that samples are compared with, at most, and numbers of all of them together.
MOST_REAL, MOST_NUMBERS = 10_000, 2**29


def build_evaluator(
    items: Items,
    model: Model,
    features: FeatureKind,
    data_name: str,
    device: torch.device = CPU,
) -> Evaluator | None:
    """An evaluator against real data; None where these are prompts alone.

    Args:
        items: the real data; of more than 10,000 items, the first ones.
        model: makes images of their samples.
        features: "auto" takes the digits' classifier for the digits, the colours of other
            pictures that are larger than 16 by 16, and all numbers of anything else.
        data_name: as in the recipe.
        device: to make images of latents on.

    Raises:
        UserError: where the features cannot be had.
    """
    if not items.has_samples:
        return None
    labels = items.labels if isinstance(items, Dataset) else None
    labels = labels[:MOST_REAL] if labels is not None else None
    real = real_images(items, model, device)
    large = real.ndim == 4 and min(real.shape[2:]) > 16
    network: FeatureNetwork
    if features == "digits" or (features == "auto" and data_name == "digits"):
        network = train_digit_classifier()
    elif features == "inception":
        try:
            network = InceptionFeatures()
        except ImportError as error:
            raise UserError(f"features: 'inception': {error}") from error
    elif features == "colours" or (features == "auto" and large):
        network = ColourFeatures()
    elif real[0].numel() > MOST_RAW:
        raise UserError(
            f"features: 'raw': samples have {real[0].numel():,} numbers; at most {MOST_RAW:,} can "
            f"be compared as they are. Use 'colours', or 'inception'"
        )
    else:
        network = RawFeatures()
    return Evaluator(real, labels, network)


def real_images(items: Items, model: Model, device: torch.device = CPU) -> Tensor:
    """The images of the first items, [N, ...] on the CPU: at most 10,000, or 2 GB of them.

    Args:
        items: with samples.
        model: makes images of them.
        device: to make them on.
    """
    if isinstance(items, Dataset):
        return items.samples[:MOST_REAL]

    def images(some: Tensor) -> Tensor:
        return model.decode(items.x0(some).to(device, torch.float32)).cpu()

    one = images(torch.tensor([0]))
    numbers = torch.arange(min(len(items), MOST_REAL, max(1, MOST_NUMBERS // one.numel())))
    return torch.cat([images(some) for some in torch.split(numbers, samples_at_once(model))])


@final
@dataclass(frozen=True)
class Judge:
    """What samples are judged by: real images, how well they fit their prompts, or both."""

    evaluator: Evaluator | None
    clip: ClipScore | None

    def __call__(self, samples: Samples) -> dict[str, float | None]:
        """Figures by name."""
        found: dict[str, float | None] = {}
        if self.evaluator is not None:
            found |= self.evaluator.evaluate(samples.images, samples.labels).as_dict()
        if self.clip is not None and samples.conditions.prompts is not None:
            found["clip_score"] = self.clip(samples.images, samples.conditions.prompts)
        return found


def build_judge(
    settings: ValidationSettings,
    items: Items,
    model: Model,
    data_name: str,
    device: torch.device = CPU,
) -> Judge:
    """What a run's samples are judged by; arguments as for `build_evaluator`.

    Raises:
        UserError: where the metric that names the best student cannot be measured.
    """
    evaluator = build_evaluator(items, model, settings.features, data_name, device)
    clip = None
    if settings.clip is not None:
        try:
            clip = ClipScore(settings.clip)
        except UserError as error:
            if settings.metric == "clip_score":
                raise UserError(f"validation.clip: {error}") from error
            logger.warning("validation.clip: %s; no CLIP score is measured", error)
    if evaluator is None and settings.metric not in (None, "clip_score"):
        raise UserError(
            f"validation.metric: {settings.metric!r} compares with real images, and the data are "
            f"prompts alone; use 'clip_score' with validation.clip, or null"
        )
    return Judge(evaluator, clip)


def sampled_role(roles: Container[str]) -> str:
    """The role that stands for the result: student_ema where there is one."""
    return STUDENT_EMA if STUDENT_EMA in roles else STUDENT


def validation_samples(
    settings: ValidationSettings,
    roles: Roles,
    spec: SamplerSpec,
    items: Items | None,
    ranks: Ranks = SINGLE,
) -> Samples | None:
    """What the student, or its average, is judged by; None before the student's first update.

    Args:
        settings: how many, and of which noise.
        roles: hold the student.
        spec: how it is sampled.
        items: whose prompts the samples have, where the network takes any.
        ranks: that share the sampling; every one of them calls this.
    """
    if roles[STUDENT].successful == 0:
        return None  # in the fake-only warm-up there is no student to judge yet
    return sample_role(
        roles,
        sampled_role(roles),
        spec,
        conditions_in_turn(roles.model.classes, items, settings.samples),
        seed=settings.seed,
        batch_size=settings.batch_size,
        ranks=ranks,
    )


@final
class ValidationHook:
    """Samples the student, measures, and remembers the best cycle."""

    def __init__(
        self,
        settings: ValidationSettings,
        sample: Callable[[ValidationSettings], Samples | None],
        judge: Judge | None,
        metrics: Metrics,
        last_cycle: int,
        best: dict[str, Any] | None,
        on_best: Callable[[int, dict[str, Any]], None],
        on_samples: Callable[[int, Samples], None],
        ranks: Ranks = SINGLE,
    ) -> None:
        """Prepare to validate.

        Args:
            settings: schedule and metric.
            sample: gives the `validation_samples` of the student as it is now.
            judge: knows the real data; only rank 0 needs one.
            metrics: where results go.
            last_cycle: is validated whatever the schedule.
            best: the best so far, of a resumed run.
            on_best: called with the cycle and {"cycle", "metric", "value"} of a new best.
            on_samples: called with the cycle and the samples, on rank 0.
            ranks: that share the sampling.
        """
        self._ranks = ranks
        self._settings = settings
        self._sample = sample
        self._judge = judge
        self._on_samples = on_samples
        self._metrics = metrics
        self._last_cycle = last_cycle
        # Figures of another metric, that of the run before it was resumed, do not compare.
        self.best = best if best is not None and best["metric"] == settings.metric else None
        self._on_best = on_best

    def after_cycle(self, cycle: int, results: Sequence[PhaseResult]) -> None:
        """See `Hook`."""
        if cycle != self._last_cycle and cycle % self._settings.every != 0:
            return
        samples = self._sample(self._settings)
        if samples is None:
            return
        values = self.judge(samples)
        if values is None:
            # The run goes on: it may recover, or end by its skipped updates.
            message = "no validation: the student's samples are not finite"
            logger.warning("cycle %d: %s", cycle, message)
            self._metrics.write("warning", cycle, cycle, {"message": message})
            return
        if values:
            self._metrics.write("validation", cycle, cycle, values)
        if self._ranks.first:
            self._on_samples(cycle, samples)
        value = values.get(self._settings.metric or "")
        if value is not None and self._improves(value):
            self.best = {"cycle": cycle, "metric": self._settings.metric, "value": value}
            self._on_best(cycle, self.best)

    def judge(self, samples: Samples) -> dict[str, Any] | None:
        """Metrics of samples; None where they are not finite."""
        values = None
        if self._judge is not None and torch.isfinite(samples.images).all():
            values = self._judge(samples)
        # All ranks must agree on which cycle is the best: they save it together.
        return self._ranks.tell(lambda: values)

    def _improves(self, value: float) -> bool:
        if self.best is None:
            return True
        if self._settings.metric in HIGHER_IS_BETTER:
            return bool(value > self.best["value"])
        return bool(value < self.best["value"])
