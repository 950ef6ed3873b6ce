"""Feature networks: what turns images into the vectors that metrics compare.

All of them run in evaluation mode, without gradients and in batches, and return tensors on the CPU.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Protocol, final, runtime_checkable

import torch
from torch import Tensor, nn
from torch.nn import functional

from fewstep.data import digits

BATCH_SIZE: Final = 256
DIGIT_FEATURES: Final = 64


class FeatureNetwork(Protocol):
    """Anything that maps images to feature vectors."""

    def features(self, images: Tensor) -> Tensor:
        """Map images [N, ...] to feature vectors [N, D] on the CPU."""
        ...


@runtime_checkable
class Classifier(Protocol):
    """A feature network may also be a classifier; then class figures can be computed."""

    def classify(self, images: Tensor) -> Tensor:
        """Map images [N, ...] to logits [N, classes] on the CPU."""
        ...


@final
class RawFeatures:
    """The pixels (or coordinates) themselves as features."""

    def features(self, images: Tensor) -> Tensor:
        """Flatten images [N, ...] to [N, D] on the CPU, in their own dtype."""
        return images.detach().flatten(1).cpu()


@final
class ColourFeatures:
    """Colours averaged over a grid of 8 by 8: few enough that some hundred images tell them apart.

    The covariance of a Fréchet distance has as many rows as there are features: those of raw
    pixels do not fit into memory, and cannot be estimated.
    """

    def features(self, images: Tensor) -> Tensor:
        """Images [N, C, H, W] to [N, 64 C] on the CPU, in their own dtype."""
        return functional.adaptive_avg_pool2d(images.detach(), 8).flatten(1).cpu()


@final
class ModuleFeatures:
    """The flattened output of any module as features.

    Args:
        module: Maps [B, ...] to one tensor [B, ...]; its device, dtype and train/eval state stay.
        batch_size: Images per forward pass.
    """

    def __init__(self, module: nn.Module, batch_size: int = BATCH_SIZE) -> None:
        self.module = module
        self.batch_size = batch_size

    def features(self, images: Tensor) -> Tensor:
        """Map images [N, ...] to features [N, D] on the CPU, in the module's dtype.

        Raises:
            ValueError: Without images, or if the module does not return one row per image.
        """
        return _run_in_batches(self.module, self.module, images, self.batch_size).flatten(1)


@final
class InceptionFeatures:
    """Inception v3's 2,048 pooled features, with the weights that published FIDs use.

    Needs the extra ``fewstep[inception]``; torch-fidelity fetches the weights on first use.

    Args:
        device: Where the network runs.
        batch_size: Images per forward pass.

    Raises:
        ImportError: Without torch-fidelity, naming the extra to install.
    """

    def __init__(self, device: torch.device | str = "cpu", batch_size: int = 64) -> None:
        from torchmetrics.image.fid import NoTrainInceptionV3

        try:
            network = NoTrainInceptionV3(name="inception-v3-compat", features_list=["2048"])
        except ModuleNotFoundError as error:
            raise ImportError(
                "Inception features need torch-fidelity: pip install 'fewstep[inception]'"
            ) from error
        self.network: nn.Module = network.to(device)
        self.batch_size = batch_size

    def features(self, images: Tensor) -> Tensor:
        """Map images [N, 1 or 3, H, W] in [-1, 1] to float32 features [N, 2048] on the CPU."""
        return _run_in_batches(
            lambda batch: self.network(to_rgb_bytes(batch)), self.network, images, self.batch_size
        )


def to_rgb_bytes(images: Tensor) -> Tensor:
    """Quantise images [N, 1 or 3, H, W] in [-1, 1] to uint8 [N, 3, H, W].

    Values outside the range are clipped, and one channel is repeated three times.

    Raises:
        ValueError: If the images do not have one or three channels.
    """
    if images.ndim != 4 or images.shape[1] not in (1, 3):
        raise ValueError(f"expected images [N, 1 or 3, H, W], got shape {tuple(images.shape)}")
    levels = (images.float() * 127.5 + 127.5).round().clamp(0, 255).to(torch.uint8)
    return levels.expand(-1, 3, -1, -1)


@final
class DigitClassifier(nn.Module):
    """A small convolutional classifier of 8x8 digits; its features are the penultimate layer."""

    def __init__(self) -> None:
        super().__init__()
        channels, height, width = digits.IMAGE_SHAPE
        self.body = nn.Sequential(
            nn.Conv2d(channels, 16, 3, padding=1),
            nn.SiLU(),
            nn.Conv2d(16, 32, 3, padding=1, stride=2),
            nn.SiLU(),
            nn.Flatten(),
            nn.Linear(32 * (height // 2) * (width // 2), DIGIT_FEATURES),
            nn.SiLU(),
            nn.BatchNorm1d(DIGIT_FEATURES, affine=False),  # features of about unit variance
        )
        self.head = nn.Linear(DIGIT_FEATURES, digits.NUM_CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        """Map images [N, 1, 8, 8] to logits [N, 10], with gradients."""
        logits: Tensor = self.head(self.body(images))
        return logits

    def features(self, images: Tensor) -> Tensor:
        """Map images [N, 1, 8, 8] in [-1, 1] to float32 features [N, 64] on the CPU.

        Raises:
            ValueError: Without images, or if they have another shape.
        """
        return _run_in_batches(self.body, self, _digit_images(images), BATCH_SIZE)

    def classify(self, images: Tensor) -> Tensor:
        """Map images [N, 1, 8, 8] in [-1, 1] to float32 logits [N, 10] on the CPU.

        Raises:
            ValueError: Without images, or if they have another shape.
        """
        return _run_in_batches(self, self, _digit_images(images), BATCH_SIZE)


@functools.cache
def train_digit_classifier(seed: int = 0) -> DigitClassifier:
    """Train the classifier on all digits, once per process and seed.

    The result is shared: it is frozen and in evaluation mode, and must not be changed.
    """
    return fit_digit_classifier(*digits.load_digits(), seed=seed)


def fit_digit_classifier(
    images: Tensor, labels: Tensor, *, seed: int = 0, epochs: int = 16, batch_size: int = 64
) -> DigitClassifier:
    """Train a classifier by Adam with a decaying learning rate; takes one to three seconds.

    A pure function of its arguments on a given machine: it reads and leaves alone the global
    random state, and runs in one thread because reduction order depends on their number.

    Args:
        images: float32 [N, 1, 8, 8] in [-1, 1].
        labels: int64 [N] in 0..9.
        seed: Of the initial weights and the data order.
        epochs: Passes over the data.
        batch_size: Images per step, at least.

    Returns:
        The frozen classifier in evaluation mode, on the CPU.
    """
    order = torch.Generator().manual_seed(seed)
    with _one_thread(), torch.inference_mode(False):  # gradients, wherever it is called
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed GPUs too
            network = DigitClassifier().float()
        optimizer = torch.optim.Adam(network.parameters(), lr=2e-3)
        batches = max(1, len(images) // batch_size)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * batches)
        for _ in range(epochs):
            for rows in torch.randperm(len(images), generator=order).tensor_split(batches):
                loss = functional.cross_entropy(network(images[rows]), labels[rows])
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                schedule.step()
    return network.eval().requires_grad_(False)


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Put a module into evaluation mode; restore every submodule's own state on exit."""
    before = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in before:
            part.training = training


@torch.no_grad()
def _run_in_batches(
    forward: Callable[[Tensor], Tensor], module: nn.Module, images: Tensor, batch_size: int
) -> Tensor:
    """Run images [N, ...] through `forward` on `module`'s device and in its dtype: [N, ...]."""
    if len(images) == 0:
        raise ValueError("no images to compute features of")
    like = next(module.parameters(), images)
    with _evaluation_mode(module):
        outputs = [
            forward(batch.to(like.device, like.dtype)).cpu()
            for batch in torch.split(images, batch_size)
        ]
    result = torch.cat(outputs)
    if len(result) != len(images):
        raise ValueError(f"the module made {len(result)} rows of {len(images)} images")
    return result


def _digit_images(images: Tensor) -> Tensor:
    if images.shape[1:] != digits.IMAGE_SHAPE:
        raise ValueError(f"expected images [N, 1, 8, 8], got shape {tuple(images.shape)}")
    return images
