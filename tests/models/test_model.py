import pytest
import torch
from torch import Tensor, nn

from fewstep.diffusion.paths import EDM, Path, RectifiedFlow, VariancePreserving
from fewstep.models.model import Denoiser
from fewstep.models.module import ModuleModel

NULL = 3


class Spy(nn.Module):
    """A class-conditional network that writes down its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(NULL + 1, 2)
        self.calls: list[tuple[Tensor, Tensor, Tensor]] = []

    def forward(self, x: Tensor, timestep: Tensor, class_labels: Tensor) -> Tensor:
        self.calls.append((x, timestep, class_labels))
        return torch.tanh(x) * (1 + timestep[:, None]) + self.table(class_labels)


def make(path: Path | None = None, kind: str = "velocity") -> tuple[Denoiser, Spy]:
    torch.manual_seed(0)
    spy = Spy().double()
    model = ModuleModel(
        Spy,
        (2,),
        classes=NULL,
        null_label=NULL,
        path=path or RectifiedFlow(1.0),
        prediction=kind,  # type: ignore[arg-type]
    )
    return Denoiser(model, spy, lambda: None), spy


X = torch.randn(4, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
SIGMA = torch.tensor([0.3, 0.5, 0.8, 0.9], dtype=torch.float64)
LABELS = {"class_labels": torch.tensor([0, 1, 2, 0])}


def test_guidance_one_makes_one_call() -> None:
    denoiser, spy = make()
    guided = denoiser.guided(X, SIGMA, LABELS, 1.0)
    assert len(spy.calls) == 1
    assert torch.equal(spy.calls[0][2], LABELS["class_labels"])
    assert torch.equal(guided.output, denoiser(X, SIGMA, LABELS).output)


@pytest.mark.parametrize("scale", [0.0, 0.5, 3.0])
def test_any_other_guidance_makes_two_calls_at_the_same_input(scale: float) -> None:
    denoiser, spy = make()
    denoiser.guided(X, SIGMA, LABELS, scale)
    assert len(spy.calls) == 2
    (x, sigma, labels), (x_null, sigma_null, null) = spy.calls
    assert x is x_null is X
    assert torch.equal(sigma, sigma_null)
    assert torch.equal(labels, LABELS["class_labels"])
    assert null.tolist() == [NULL] * 4


@pytest.mark.parametrize("path", [RectifiedFlow(1.0), VariancePreserving(), EDM()], ids=repr)
@pytest.mark.parametrize("kind", ["x0", "eps", "v", "velocity"])
def test_guided_prediction_is_the_formula_in_every_kind(path: Path, kind: str) -> None:
    denoiser, _ = make(path, kind)
    conditional = denoiser(X, SIGMA, LABELS)
    unconditional = denoiser(X, SIGMA, denoiser.model.unconditional(LABELS))
    guided = denoiser.guided(X, SIGMA, LABELS, 2.5)
    for form in ("x0", "eps", "v", "velocity"):
        c, u = conditional.to(form), unconditional.to(form)  # type: ignore[arg-type]
        torch.testing.assert_close(guided.to(form), u + 2.5 * (c - u))  # type: ignore[arg-type]


def test_one_sigma_serves_all_samples_and_stays_exact() -> None:
    denoiser, spy = make()
    sigma = torch.tensor(1 / 3, dtype=torch.float64)
    prediction = denoiser(X, sigma, LABELS)
    assert spy.calls[0][1].tolist() == [1 / 3] * 4
    assert prediction.sigma is sigma
    assert prediction.x is X
    assert prediction.path is denoiser.model.path
    assert prediction.kind == "velocity"


def test_a_denoiser_out_of_use_is_refused_before_its_network_runs() -> None:
    inner, spy = make()

    def refuse() -> None:
        raise RuntimeError("not in use")

    with pytest.raises(RuntimeError, match="not in use"):
        Denoiser(inner.model, spy, refuse)(X, SIGMA, LABELS)
    assert spy.calls == []


def test_example_conditions_are_valid() -> None:
    denoiser, _ = make()
    assert denoiser.model.example_condition(5)["class_labels"].tolist() == [0, 1, 2, 0, 1]
    assert ModuleModel(Spy, (2,)).example_condition(5) == {}


def test_the_student_starts_as_a_copy_of_the_teacher() -> None:
    denoiser, spy = make()
    student = denoiser.model.student_network(spy)
    assert student is not spy
    for name, parameter in spy.named_parameters():
        copied = student.get_parameter(name)
        assert copied is not parameter
        assert torch.equal(copied, parameter)
