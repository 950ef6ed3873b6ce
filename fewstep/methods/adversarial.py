"""DMD2's adversarial head (Yin et al., arXiv 2405.14867, section 4.3).

A classifier tells real samples from the student's, both noised, by features of a score network. The
student is also trained to deceive it: unlike the scores, it has seen the data, so that the student
may become better than its teacher.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Literal, final

import torch
from pydantic import Field
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
from fewstep.methods.method import PhaseLoss
from fewstep.methods.options import SigmaSampling
from fewstep.models.block_features import feature_widths
from fewstep.models.classifier import ClassifierHead
from fewstep.models.model import Condition, Model
from fewstep.roles.role import DISCRIMINATOR, TEACHER_SCORE, Roles
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
    classifier_weight: Positive = Field(1e-2, description="of the discriminator's own loss")
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
class Adversary:
    """What the classifier says of the student's samples, and how it learns to."""

    def __init__(self, settings: AdversarialSettings) -> None:
        """`settings`: of the recipe; with a generator_weight above 0."""
        self.settings = settings

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
            roles: the classifier, and the one that it looks into.
            x0: detached student samples [B, ...].
            batch: whose they are, and real ones.
            draw: random numbers of the phase.
        """
        if batch.x0 is None:
            raise ValueError("the adversarial head is trained on data: the batch has none")
        ids, s, shape, dtype = batch.sample_ids, self.settings, x0.shape[1:], x0.dtype
        sigma = s.sigmas.sample(draw, ids, dtype)
        noise = {key: draw.normal(key, ids, shape, dtype) for key in ("eps_real", "eps_fake")}
        real = roles.model.path.add_noise(batch.x0, noise["eps_real"], sigma)
        fake = roles.model.path.add_noise(x0.detach(), noise["eps_fake"], sigma)
        inputs = [real, fake]
        approximate = s.r1 is not None and s.r1.kind == "approximate"
        if s.r1 is not None and approximate:
            # The very input that the classifier sees as real, and its level, but for delta.
            inputs.append(real + s.r1.std * draw.normal("r1_delta", ids, shape, dtype))
        parts = len(inputs)
        condition = {key: torch.cat([value] * parts) for key, value in batch.condition.items()}
        with torch.no_grad(), roles.use_features(s.features_from, s.blocks) as features:
            tokens = features(torch.cat(inputs), torch.cat([sigma] * parts), condition)
        logits = self._classify(roles, tokens, in_training=True).chunk(parts)
        loss = classifier_loss(logits[0], logits[1])
        metrics = {
            "classifier_loss": loss,
            "logit_real": logits[0],
            "logit_fake": logits[1],
            "accuracy": accuracy(logits[0], logits[1]),
        }
        if s.r1 is not None:
            r1 = (
                approximate_r1(logits[0], logits[2])
                if approximate
                else self._exact_r1(roles, real, sigma, batch.condition)
            )
            loss = loss + s.r1.weight * r1
            metrics["r1"] = r1
        means = {key: value.detach().mean() for key, value in metrics.items()}
        return PhaseLoss(s.classifier_weight * loss.mean(), means)

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
