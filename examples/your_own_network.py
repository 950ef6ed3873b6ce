"""Distil a network of your own: a plain torch module and a data set, in about 30 lines.

Points on two moons; a perceptron learns them by flow matching and is then distilled to one step.
"""

import sys

import torch
from sklearn.datasets import make_moons
from torch import nn

import fewstep


class Perceptron(nn.Module):
    """Called as network(x [B, 2], sigma [B]); predicts the velocity eps - x0 [B, 2]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 2)
        )

    def forward(self, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        return self.layers(torch.cat([x, sigma[:, None], sigma[:, None] ** 2], dim=1))


points = torch.tensor(make_moons(2000, noise=0.05, random_state=0)[0], dtype=torch.float32)
data = fewstep.Dataset(points - points.mean(0))
model = fewstep.ModuleModel(Perceptron, sample_shape=(2,))
out = sys.argv[1] if len(sys.argv) > 1 else "runs/moons"

common = {
    "model": {"family": "module"},
    "data": {"name": "custom"},
    "logging": {"tensorboard": False},
}
teacher = fewstep.train(
    fewstep.parse_recipe(
        {
            **common,
            "run_dir": f"{out}/teacher",
            "method": {"name": "flow_matching"},
            "optimizers": {"student": {"lr": 2e-3, "betas": [0.9, 0.99]}},
            "ema": {"decay": 0.99},
            "train": {"cycles": 2000, "batch_size": 256},
        }
    ),
    model=model,
    data=data,
)
student = fewstep.train(
    fewstep.parse_recipe(
        {
            **common,
            "run_dir": f"{out}/student",
            "model": {"family": "module", "weights": f"{out}/teacher"},
            "method": {"name": "dmd2", "steps": 1, "fake_updates_per_student": 5},
            "optimizers": {"student": {"lr": 5e-4}, "fake_score": {"lr": 1e-3}},
            "ema": {"decay": 0.98},
            "train": {"cycles": 400, "batch_size": 256},
        }
    ),
    model=model,
    data=data,
)

sources = [fewstep.run_source(teacher), fewstep.run_source(student)]
document, samples = fewstep.evaluate_sources(sources, steps=[1, 4, 50], dataset=data)
for row in document["results"]:
    print(
        f"{row['model']}, {row['nfe']} network calls: coverage {row['coverage']:.2f}, "
        f"Fréchet distance {row['frechet_distance']:.4f}"
    )
