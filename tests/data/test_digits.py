import torch

from fewstep.data import digits


def test_digits_are_float_images_in_minus_one_to_one_with_integer_labels():
    images, labels = digits.load_digits()
    assert images.shape == (1797, *digits.IMAGE_SHAPE)
    assert images.dtype == torch.float32
    assert images.min() == -1
    assert images.max() == 1
    assert labels.shape == (1797,)
    assert labels.dtype == torch.int64
    assert labels.unique().tolist() == list(range(digits.NUM_CLASSES))


def test_digits_are_scikit_learns_values_in_its_order():
    from sklearn import datasets

    images, labels = digits.load_digits()
    reference = datasets.load_digits()
    restored = ((images[:, 0] + 1) * 8).double().numpy()
    assert (restored == reference.images).all()
    assert (labels.numpy() == reference.target).all()


def test_changing_what_was_loaded_does_not_change_the_next_load():
    images, labels = digits.load_digits()
    expected = images.clone(), labels.clone()
    images.zero_()
    labels.zero_()
    again = digits.load_digits()
    assert torch.equal(again[0], expected[0])
    assert torch.equal(again[1], expected[1])
