"""Distil a network of your own: a plain torch module and a data set, in about 30 lines.

Points on two moons; a perceptron learns them by flow matching and is then distilled to one step.
"""

import sys
from pathlib import Path

import torch
from sklearn.datasets import make_moons
from torch import nn

import fewstep
from fewstep.checkpoint import complete_checkpoints


class Perceptron(nn.Module):
    """Called as network(x [B, 2], sigma [B]); predicts the velocity eps - x0 [B, 2]."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [nn.Linear(4, 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU(), nn.Linear(128, 2)]
        self.layers = nn.Sequential(*sizes)

    def forward(self, x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:  # noqa: D102
        return self.layers(torch.cat([x, sigma[:, None], sigma[:, None] ** 2], dim=1))


out = sys.argv[1] if len(sys.argv) > 1 else "runs/moons"
points = torch.tensor(make_moons(2000, noise=0.05, random_state=0)[0], dtype=torch.float32)
data = fewstep.Dataset(points - points.mean(0))
model = fewstep.ModuleModel(Perceptron, sample_shape=(2,))
common = {
    "data": {"name": "custom"},
    "logging": {"tensorboard": False},
    "runtime": {"threads": 1},
}


def run(values: dict) -> fewstep.Run:
    """Train, or go on with a run that is there already."""
    recipe = fewstep.parse_recipe({**common, **values})
    resume = bool(complete_checkpoints(Path(recipe.run_dir)))
    try:
        done = fewstep.train(recipe, model=model, data=data, resume=resume)
    except (fewstep.UserError, fewstep.TrainingError) as error:
        sys.exit(f"Error: {error}")
    if not done.complete:
        sys.exit(f"Stopped after cycle {done.cycle} and saved: run this again to go on")
    return done


teacher_recipe = {
    "run_dir": f"{out}/teacher",
    "model": {"family": "module"},
    "method": {"name": "flow_matching"},
    "optimizers": {"student": {"lr": 2e-3, "betas": [0.9, 0.99]}},
    "ema": {"decay": 0.99},
    "train": {"cycles": 1500, "batch_size": 256},
}
student_recipe = {
    "run_dir": f"{out}/student",
    "model": {"family": "module", "weights": f"{out}/teacher"},
    "method": {"name": "dmd2", "steps": 1, "fake_updates_per_student": 5},
    "optimizers": {"student": {"lr": 5e-4}, "fake_score": {"lr": 1e-3}},
    "ema": {"decay": 0.98},
    "train": {"cycles": 400, "batch_size": 256},
}
sources = [fewstep.run_source(run(teacher_recipe)), fewstep.run_source(run(student_recipe))]
document, samples = fewstep.evaluate_sources(sources, steps=[1, 4, 50], dataset=data)
for row in document["results"]:
    print(
        f"{row['model']}, {row['nfe']} network calls: coverage {row['coverage']:.2f}, "
        f"Fréchet distance {row['frechet_distance']:.4f}"
    )
