"""Sampling time of the four-step student against the fifty-step teacher, beside their NFE."""

from rich.table import Table

from benchmarks.setup import alternate, digits_worker
from fewstep.data.conditions import conditions_in_turn
from fewstep.diffusion.timesteps import few_step_grid
from fewstep.methods.method import SamplerSpec
from fewstep.sampling import sample_role

COUNT = 256


def run() -> Table:
    """The table; the time ratio should be near the NFE ratio."""
    worker = digits_worker("independent")
    conditions = conditions_in_turn(worker.roles.model.classes, None, COUNT)
    teacher = SamplerSpec(few_step_grid(50), "euler")
    student = worker.method.sampler()

    def sample(role: str, spec: SamplerSpec) -> None:
        sample_role(worker.roles, role, spec, conditions)

    slow, fast, ratio = alternate(
        lambda: sample("teacher_score", teacher), lambda: sample("student", student), rounds=5
    )
    table = Table(title=f"Sampling {COUNT} digits")
    for name in ("", "NFE", "seconds"):
        table.add_column(name, justify="right")
    table.add_row("teacher", str(teacher.nfe), f"{slow:.3f}")
    table.add_row("student", str(student.nfe), f"{fast:.3f}")
    table.add_row("ratio", f"{teacher.nfe / student.nfe:.1f}", f"{ratio:.1f}")
    return table
