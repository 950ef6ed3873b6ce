"""DMD2's adversarial head (Yin et al., arXiv 2405.14867, section 4.3).

A classifier tells real samples from the student's, both noised, by features of a score network. The
student is also trained to deceive it: unlike the scores, it has seen the data, so that the student
may become better than its teacher.

The classifier is a role of its own, or, as in DMD2's code, trained as one with the fake score.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Literal, final

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from fewstep.data.batches import Batch
from fewstep.diffusion.draw import Draw
from fewstep.diffusion.gan import (
    accuracy,
    approximate_r1,
    classifier_loss,
    exact_r1,
    generator_loss,
    linear_surrogate,
)
from fewstep.diffusion.prediction import Prediction
from fewstep.methods.method import PhaseLoss
from fewstep.methods.options import SigmaSampling
from fewstep.models.block_features import feature_widths
from fewstep.models.classifier import ClassifierHead
from fewstep.models.model import Condition, Model
from fewstep.roles.role import DISCRIMINATOR, FAKE_SCORE, TEACHER_SCORE, Roles
from fewstep.settings import Settings

Positive = Annotated[float, Field(gt=0)]


@final
class R1Settings(Settings):
    """A penalty on how steep the classifier is around real samples."""

    kind: Literal["approximate", "exact"] = Field(
        "approximate",
        description="approximate: squared change of the logit where its input is moved a little; "
        "exact: squared norm of its gradient (not under fsdp1 and fsdp2)",
    )
    weight: Positive = Field(description="of the penalty, beside the classifier's loss")
    std: Positive = Field(0.01, description="approximate: how far the input is moved")


@final
class AdversarialSettings(Settings):
    """A classifier of real and made samples, which the student is to deceive."""

    generator_weight: Annotated[float, Field(ge=0)] = Field(
        3e-3, description="of the student's adversarial loss; 0: all of this is off"
    )
    classifier_weight: Positive = Field(1e-2, description="of the classifier's own loss")
    trained_with: Literal["discriminator", "fake_score"] = Field(
        "discriminator",
        description="discriminator: a role of its own, with phases and an optimizer; fake_score: "
        "as a part of that role, by a loss that is added to the fake score's and shapes its "
        "features too",
    )
    features_from: Literal["fake_score", "teacher_score"] = Field(
        "fake_score", description="the role whose network the classifier looks into"
    )
    blocks: Annotated[tuple[str, ...], Field(min_length=1)] | None = Field(
        None, description="names of the blocks whose outputs it sees; null: the one in the middle"
    )
    width: Annotated[int, Field(gt=0)] | None = Field(
        None, description="of the classifier's layers; null: that of the widest block"
    )
    sigmas: SigmaSampling = Field(
        SigmaSampling(), description="noise levels at which samples are classified"
    )
    r1: R1Settings | None = Field(None, description="null: none, as in DMD2")

    @model_validator(mode="after")
    def _check(self) -> AdversarialSettings:
        if self.trained_with != FAKE_SCORE:
            return self
        if self.features_from != FAKE_SCORE:
            raise ValueError(
                f"features_from is {self.features_from!r}, but trained_with is 'fake_score', whose "
                f"features are to learn from the classifier; use features_from 'fake_score', or "
                f"trained_with 'discriminator'"
            )
        if self.r1 is not None and self.r1.kind == "exact":
            raise ValueError(
                "r1.kind is 'exact', whose gradient is with respect to the classifier alone, but "
                "trained_with is 'fake_score', whose network is to learn as well; use 'approximate'"
            )
        return self

    def build_head(self, model: Model, teacher: nn.Module) -> ClassifierHead:
        """A classifier with fresh weights, from the global generator.

        Args:
            model: the adapter.
            teacher: the network that the roles start from; its weights are not looked at.

        Raises:
            UserError: for a block that does not exist.
        """
        network = teacher if self.features_from == TEACHER_SCORE else model.student_network(teacher)
        return ClassifierHead(feature_widths(model, network, self.blocks), self.width)


@final
@dataclass(frozen=True)
class Shown:
    """What the classifier learns from: parts of B samples, of the same conditions and levels.

    Attributes:
        parts: 2: real samples, then made ones; 3: then the real ones again, moved a little.
        x: all of them, noised [parts * B, ...].
        sigma: their levels [parts * B].
        condition: entries [parts * B, ...].
    """

    parts: int
    x: Tensor
    sigma: Tensor
    condition: Condition


@final
class Adversary:
    """What the classifier says of the student's samples, and how it learns to."""

    def __init__(self, settings: AdversarialSettings) -> None:
        """`settings`: of the recipe; with a generator_weight above 0."""
        self.settings = settings

    @property
    def trained_by(self) -> str:
        """The role in whose phases the classifier learns."""
        return self.settings.trained_with

    def generator_term(
        self, roles: Roles, x0: Tensor, batch: Batch, draw: Draw
    ) -> tuple[Tensor, Tensor]:
        """The generator's loss of detached samples, and its gradient with respect to them.

        No parameter gets a gradient, so that it does not matter who asks: the student's own
        phase, or another group that scores its samples.

        Args:
            roles: the classifier, and the one that it looks into.
            x0: the samples [B, ...].
            batch: whose they are.
            draw: random numbers of the student's phase.

        Returns:
            The gradient of each sample's own loss, like `x0`, and these losses [B]; detached, and
            perhaps not finite.
        """
        ids, s = batch.sample_ids, self.settings
        eps = draw.normal("adversarial_eps", ids, x0.shape[1:], x0.dtype)
        sigma = s.sigmas.sample(draw, ids, x0.dtype, "adversarial_sigma")
        with torch.enable_grad(), roles.use_features(s.features_from, s.blocks) as features:
            x0 = x0.detach().requires_grad_()
            tokens = features(roles.model.path.add_noise(x0, eps, sigma), sigma, batch.condition)
            loss = generator_loss(self._classify(roles, tokens, in_training=False))
            # Here, under the role that was called: recomputed blocks run forward again.
            (gradient,) = torch.autograd.grad(loss.sum(), x0)
        return gradient, loss.detach()

    def surrogate(self, x0: Tensor, gradient: Tensor, losses: Tensor) -> Tensor:
        """The student's adversarial loss, weighted [B]; arguments as `generator_term` gives them.

        A loss that is not finite counts as none: its gradient has been seen to already.
        """
        losses = torch.where(torch.isfinite(losses), losses, torch.zeros_like(losses))
        return self.settings.generator_weight * linear_surrogate(x0, gradient, losses)

    def classifier_loss(self, roles: Roles, x0: Tensor, batch: Batch, draw: Draw) -> PhaseLoss:
        """Real against made samples of the same condition, at the same levels.

        Args:
            roles: the classifier, and the one that it looks into, which learns nothing.
            x0: detached student samples [B, ...].
            batch: whose they are, and real ones.
            draw: random numbers of the phase.
        """
        s, shown = self.settings, self._show(roles, x0, batch, draw, "sigma")
        with torch.no_grad(), roles.use_features(s.features_from, s.blocks) as features:
            tokens = features(shown.x, shown.sigma, shown.condition)
        losses, metrics = self._judge(roles, tokens, shown.parts)
        if s.r1 is not None and s.r1.kind == "exact":
            real, sigma = shown.x[: len(x0)], shown.sigma[: len(x0)]
            metrics["r1"] = self._exact_r1(roles, real, sigma, batch.condition)
            losses = losses + s.r1.weight * metrics["r1"]
        return self._weighted(losses, metrics)

    def predict_and_classify(
        self, roles: Roles, x: Tensor, sigma: Tensor, x0: Tensor, batch: Batch, draw: Draw
    ) -> tuple[Prediction, PhaseLoss]:
        """The fake score's prediction at an input, and the classifier's loss, which it shares.

        One network call gives both: a sharded network is gathered once.

        Args:
            roles: classifier and fake score, both of which learn.
            x: the input [B, ...].
            sigma: its levels [B].
            x0: detached student samples [B, ...].
            batch: whose they are, and real ones.
            draw: random numbers of the phase.
        """
        shown, count = self._show(roles, x0, batch, draw, "adversarial_sigma"), len(x)
        inputs, levels = torch.cat([x, shown.x]), torch.cat([sigma, shown.sigma])
        condition = {k: torch.cat([v, shown.condition[k]]) for k, v in batch.condition.items()}
        with roles.use_features(FAKE_SCORE, self.settings.blocks, in_training=True) as features:
            both, tokens = features.predict(inputs, levels, condition)
        prediction = replace(both, output=both.output[:count], x=x, sigma=sigma)
        losses, metrics = self._judge(roles, [each[count:] for each in tokens], shown.parts)
        return prediction, self._weighted(losses, metrics)

    def _show(self, roles: Roles, x0: Tensor, batch: Batch, draw: Draw, levels: str) -> Shown:
        """Noise real and made samples; `levels`: the stream of their sigmas."""
        if batch.x0 is None:
            raise ValueError("the adversarial head is trained on data: the batch has none")
        ids, s, shape, dtype = batch.sample_ids, self.settings, x0.shape[1:], x0.dtype
        sigma = s.sigmas.sample(draw, ids, dtype, levels)
        noise = {key: draw.normal(key, ids, shape, dtype) for key in ("eps_real", "eps_fake")}
        real = roles.model.path.add_noise(batch.x0, noise["eps_real"], sigma)
        fake = roles.model.path.add_noise(x0.detach(), noise["eps_fake"], sigma)
        inputs = [real, fake]
        if s.r1 is not None and s.r1.kind == "approximate":
            # The very input that the classifier sees as real, and its level, but for delta.
            inputs.append(real + s.r1.std * draw.normal("r1_delta", ids, shape, dtype))
        parts = len(inputs)
        condition = {key: torch.cat([value] * parts) for key, value in batch.condition.items()}
        return Shown(parts, torch.cat(inputs), torch.cat([sigma] * parts), condition)

    def _judge(
        self, roles: Roles, tokens: Sequence[Tensor], parts: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The classifier's losses [B] by the tokens of what is shown, and what to log."""
        logits = self._classify(roles, tokens, in_training=True).chunk(parts)
        losses = classifier_loss(logits[0], logits[1])
        metrics = {
            "classifier_loss": losses,
            "logit_real": logits[0],
            "logit_fake": logits[1],
            "accuracy": accuracy(logits[0], logits[1]),
        }
        if self.settings.r1 is not None and parts == 3:
            metrics["r1"] = approximate_r1(logits[0], logits[2])
            losses = losses + self.settings.r1.weight * metrics["r1"]
        return losses, metrics

    def _weighted(self, losses: Tensor, metrics: dict[str, Tensor]) -> PhaseLoss:
        means = {key: value.detach().mean() for key, value in metrics.items()}
        return PhaseLoss(self.settings.classifier_weight * losses.mean(), means)

    def _exact_r1(self, roles: Roles, x: Tensor, sigma: Tensor, condition: Condition) -> Tensor:
        classify = partial(self._classify, roles, in_training=True)
        with (
            torch.enable_grad(),
            roles.use_features(self.settings.features_from, self.settings.blocks) as features,
        ):
            return exact_r1(lambda x: features(x, sigma, condition), classify, x)

    def _classify(self, roles: Roles, tokens: Sequence[Tensor], in_training: bool) -> Tensor:
        logits: Tensor = roles.head(DISCRIMINATOR, in_training)(*tokens)
        return logits[:, 0].to(tokens[0].dtype)
