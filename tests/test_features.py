import pytest
import torch
from torch import nn

from fewstep import features
from fewstep.data.digits import load_digits


@pytest.fixture(scope="module")
def split():
    images, labels = load_digits()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return images[order], labels[order]


def accuracy(classifier, images, labels):
    return (classifier.classify(images).argmax(1) == labels).float().mean().item()


class Recorder(nn.Module):
    """Notes how it was called; dropout shows whether it ran in evaluation mode."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.linear = nn.Linear(4, 3, dtype=dtype)
        self.dropout = nn.Dropout(0.5)
        self.batch_sizes = []
        self.grad = []

    def forward(self, x):
        self.batch_sizes.append(len(x))
        self.grad.append(torch.is_grad_enabled())
        return self.dropout(self.linear(x.flatten(1)))[:, :, None]


def test_digit_classifier_generalises(split):
    images, labels = split
    classifier = features.fit_digit_classifier(images[:1300], labels[:1300])
    assert accuracy(classifier, images[:1300], labels[:1300]) >= 0.999
    assert accuracy(classifier, images[1300:], labels[1300:]) >= 0.97


def test_digit_classifier_fits_all_digits_and_its_features_feed_its_head():
    images, labels = load_digits()
    classifier = features.train_digit_classifier()
    assert accuracy(classifier, images, labels) >= 0.999
    vectors = classifier.features(images)
    assert vectors.shape == (1797, features.DIGIT_FEATURES)
    torch.testing.assert_close(classifier.head(vectors), classifier.classify(images))
    assert torch.linalg.matrix_rank(torch.cov(vectors.double().T)) == features.DIGIT_FEATURES


def test_same_seed_gives_the_same_weights_whatever_the_global_state(split):
    images, labels = split[0][:256], split[1][:256]
    weights = []
    threads = torch.get_num_threads()
    for global_seed, surroundings in enumerate(
        (torch.enable_grad, torch.no_grad, torch.inference_mode)
    ):
        torch.manual_seed(global_seed)
        with surroundings():
            classifier = features.fit_digit_classifier(
                images.clone(), labels.clone(), seed=3, epochs=2
            )
        weights.append(nn.utils.parameters_to_vector(classifier.parameters()))
    assert torch.equal(weights[0], weights[1])
    assert torch.equal(weights[0], weights[2])
    other = features.fit_digit_classifier(images, labels, seed=4, epochs=2)
    assert not torch.equal(weights[0], nn.utils.parameters_to_vector(other.parameters()))
    assert torch.get_num_threads() == threads


def test_training_restores_threads_and_leaves_the_global_generator_alone(split):
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        before = torch.get_rng_state()
        features.fit_digit_classifier(split[0][:128], split[1][:128], epochs=1)
        assert torch.equal(torch.get_rng_state(), before)
        assert torch.get_num_threads() == 2
        with pytest.raises(IndexError):
            features.fit_digit_classifier(split[0][:128], split[1][:128] + 99, epochs=1)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)


def test_trained_classifier_is_shared_frozen_and_in_evaluation_mode():
    classifier = features.train_digit_classifier()
    assert classifier is features.train_digit_classifier()
    afresh = features.train_digit_classifier.__wrapped__(0)
    for name, weight in classifier.state_dict().items():
        assert torch.equal(afresh.state_dict()[name], weight), name
    assert not classifier.training
    assert not any(parameter.requires_grad for parameter in classifier.parameters())
    assert isinstance(classifier, features.Classifier)


def test_digit_classifier_refuses_other_shapes():
    with pytest.raises(ValueError, match=r"\[N, 1, 8, 8\].*\(2, 3, 8, 8\)"):
        features.train_digit_classifier().features(torch.zeros(2, 3, 8, 8))


def test_module_features_run_in_batches_in_evaluation_mode_without_gradients():
    module = Recorder()
    module.dropout.eval()
    images = torch.randn(10, 1, 2, 2)
    out = features.ModuleFeatures(module, batch_size=4).features(images)
    assert out.shape == (10, 3)
    torch.testing.assert_close(out, module.linear(images.flatten(1)))
    assert module.batch_sizes == [4, 4, 2]
    assert module.grad == [False] * 3
    assert not out.requires_grad
    assert module.training, "the caller's state is restored"
    assert not module.dropout.training, "and that of each part"


def test_module_features_switch_off_dropout():
    module = Recorder()
    images = torch.randn(10, 1, 2, 2)
    out = features.ModuleFeatures(module).features(images)
    torch.testing.assert_close(out, module.linear(images.flatten(1)))
    assert module.dropout.training


def test_module_features_follow_the_modules_dtype():
    out = features.ModuleFeatures(Recorder(torch.float64)).features(torch.randn(2, 1, 2, 2))
    assert out.dtype == torch.float64


def test_module_features_restore_the_state_after_an_error():
    module = Recorder()
    with pytest.raises(RuntimeError):
        features.ModuleFeatures(module).features(torch.randn(2, 5))
    assert module.training


def test_module_that_changes_the_number_of_rows_and_no_images_are_refused():
    with pytest.raises(ValueError, match="16 rows of 4 images"):
        features.ModuleFeatures(nn.Flatten(0)).features(torch.zeros(4, 4))
    with pytest.raises(ValueError, match="no images"):
        features.ModuleFeatures(Recorder()).features(torch.zeros(0, 4))


def test_raw_features_flatten():
    images = torch.arange(12.0).reshape(3, 1, 2, 2)
    assert torch.equal(features.RawFeatures().features(images), images.reshape(3, 4))
    assert not isinstance(features.RawFeatures(), features.Classifier)


def test_rgb_bytes_repeat_gray_and_clip():
    images = torch.tensor([-1.5, -1.0, 0.0, 1.0, 1.5, 2 * 200 / 255 - 1]).reshape(1, 1, 2, 3)
    out = features.to_rgb_bytes(images)
    assert out.shape == (1, 3, 2, 3)
    assert out.dtype == torch.uint8
    assert out[0, 0].flatten().tolist() == [0, 0, 128, 255, 255, 200]
    assert torch.equal(out[:, 0], out[:, 2])
    with pytest.raises(ValueError, match=r"1 or 3.*\(1, 2, 4, 4\)"):
        features.to_rgb_bytes(torch.zeros(1, 2, 4, 4))


def test_inception_without_its_extra_names_the_extra(monkeypatch):
    monkeypatch.setattr("torchmetrics.image.fid._TORCH_FIDELITY_AVAILABLE", False)
    with pytest.raises(ImportError, match=r"fewstep\[inception\]"):
        features.InceptionFeatures()


def test_inception_gets_bytes_in_batches(monkeypatch):
    seen = []

    class Network(nn.Module):
        def __init__(self, name, features_list):
            super().__init__()
            assert (name, features_list) == ("inception-v3-compat", ["2048"])

        def forward(self, x):
            seen.append((x.dtype, tuple(x.shape)))
            return x.float().mean((2, 3))

    monkeypatch.setattr("torchmetrics.image.fid.NoTrainInceptionV3", Network)
    out = features.InceptionFeatures(batch_size=2).features(torch.ones(3, 1, 4, 4))
    assert seen == [(torch.uint8, (2, 3, 4, 4)), (torch.uint8, (1, 3, 4, 4))]
    assert torch.equal(out, torch.full((3, 3), 255.0))
