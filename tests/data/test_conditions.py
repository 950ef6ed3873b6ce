"""What samples are conditioned on, and data sets put one after another."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from fewstep.data.batches import ConditionBatches, DataBatches, batch_source
from fewstep.data.conditions import conditions_in_turn, label_conditions, tensor_conditions
from fewstep.data.dataset import Dataset
from fewstep.data.items import Items, JoinedItems
from fewstep.diffusion.draw import Draw

CPU = torch.device("cpu")


class Texts(Items):
    """Prompts whose embedding is their length, with an image of that brightness."""

    has_samples = True

    def __init__(self, *prompts: str) -> None:
        self.prompts = prompts
        self.unconditional = {"embedding": torch.zeros(2)}

    @property
    def sha256(self) -> str:
        return "/".join(self.prompts)

    def __len__(self) -> int:
        return len(self.prompts)

    def condition(self, items: Tensor) -> dict[str, Tensor]:
        return {"embedding": self.x0(items).expand(-1, 2).half()}

    def x0(self, items: Tensor) -> Tensor:
        return torch.tensor([[float(len(self.prompts[i]))] for i in items.tolist()])


def test_classes_prompts_and_nothing_come_in_turn() -> None:
    classes = conditions_in_turn(3, None, 7)
    assert classes.labels.tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert classes.of(torch.tensor([2, 4]))["class_labels"].tolist() == [2, 1]
    assert conditions_in_turn(None, None, 7).of(torch.arange(7)) == {}
    prompts = conditions_in_turn(None, Texts("a", "bbb"), 5)
    assert prompts.prompts == ("a", "bbb", "a", "bbb", "a")
    assert prompts.of(torch.tensor([4, 1]))["embedding"][:, 0].tolist() == [1, 3]
    # Items without prompts do not say what a class-conditional network is asked for.
    images = Dataset(torch.zeros(2, 1), torch.tensor([1, 1]))
    assert conditions_in_turn(2, images, 4).labels.tolist() == [0, 1, 0, 1]


def test_encoded_prompts_are_taken_by_number() -> None:
    encoded = tensor_conditions({"pooled": torch.arange(6.0).reshape(3, 2)}, ["x", "y", "z"])
    assert len(encoded) == 3
    assert encoded.of(torch.tensor([2, 0]))["pooled"].tolist() == [[4, 5], [0, 1]]
    assert len(label_conditions(torch.arange(4))) == 4


def test_joined_items_keep_their_order() -> None:
    joined = JoinedItems(Texts("a", "bb"), Texts("ccc"))
    assert len(joined) == 3
    assert list(joined.prompts) == ["a", "bb", "ccc"]
    assert joined.prompts[1:] == ["bb", "ccc"]
    numbers = torch.tensor([2, 0, 1, 2])
    assert joined.x0(numbers)[:, 0].tolist() == [3, 1, 2, 3]
    assert joined.condition(numbers)["embedding"][:, 1].tolist() == [3, 1, 2, 3]
    assert joined.condition(torch.tensor([0]))["embedding"].dtype == torch.float16
    assert joined.unconditional["embedding"].shape == (2,)
    assert joined.sha256 != JoinedItems(Texts("a"), Texts("bb", "ccc")).sha256


def seen(batch: Mapping[str, Tensor]) -> list[float]:
    return batch["embedding"][:, 0].tolist()


def test_every_prompt_comes_once_an_epoch_in_an_order_of_its_phase() -> None:
    texts = Texts(*("x" * n for n in range(1, 13)))
    source = batch_source(texts, None, CPU, torch.float64, samples=False)
    assert isinstance(source, DataBatches)
    orders = {}
    for phase in ("student", "fake_score/0", "fake_score/1"):
        batches = [source.batch(Draw(0, cycle, phase), 4) for cycle in (1, 2, 3)]
        assert all(batch.x0 is None for batch in batches)
        assert batches[0].condition["embedding"].dtype == torch.float64
        orders[phase] = tuple(n for batch in batches for n in seen(batch.condition))
        assert sorted(orders[phase]) == list(range(1, 13))
    assert len(set(orders.values())) == 3
    part = source.batch(Draw(0, 2, "student"), 4, range(1, 3))
    assert seen(part.condition) == list(orders["student"][5:7])


def test_methods_without_data_draw_classes_and_need_no_items() -> None:
    images = Dataset(torch.zeros(2, 1), torch.tensor([1, 1]))
    assert isinstance(batch_source(images, 3, CPU, torch.float32, samples=False), ConditionBatches)
    with_samples = batch_source(images, 3, CPU, torch.float32, samples=True)
    assert with_samples.batch(Draw(0, 1, "student"), 2).x0 is not None


@pytest.mark.parametrize("phase", ["student", "fake_score/0"])
def test_images_and_prompts_of_a_batch_belong_together(phase: str) -> None:
    texts = Texts(*("x" * n for n in range(1, 9)))
    batch = DataBatches(texts, CPU).batch(Draw(1, 2, phase), 3)
    assert batch.x0[:, 0].tolist() == seen(batch.condition)
