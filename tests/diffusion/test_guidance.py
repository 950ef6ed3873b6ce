import pytest
import torch

from fewstep.diffusion.guidance import guide, scale_from_excess

CONDITIONAL, UNCONDITIONAL = torch.tensor([2.0]), torch.tensor([1.0])


def test_our_form_adds_to_the_unconditional() -> None:
    assert guide(CONDITIONAL, UNCONDITIONAL, 3.0).item() == 4


def test_the_other_form_is_ours_at_one_more() -> None:
    w = 3.0
    other = CONDITIONAL + w * (CONDITIONAL - UNCONDITIONAL)
    assert other.item() == 5
    assert guide(CONDITIONAL, UNCONDITIONAL, scale_from_excess(w)).item() == 5


@pytest.mark.parametrize(("scale", "expected"), [(0.0, 1.0), (1.0, 2.0), (1.5, 2.5)])
def test_scale_zero_is_unconditional_and_one_conditional(scale: float, expected: float) -> None:
    assert guide(CONDITIONAL, UNCONDITIONAL, scale).item() == expected
