"""Bytes of weights by role: computed from the parameters, and counted in distinct storages."""

from rich.table import Table

from benchmarks.setup import digits_worker
from fewstep.roles.role import Roles


def allocated(roles: Roles) -> int:
    """Bytes of all distinct tensor storages behind the networks' parameters and buffers."""
    storages = {}
    for network in roles.storage.networks.values():
        for tensor in network.state_dict().values():
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def run() -> Table:
    """The table; shared storage must hold one copy of the base."""
    table = Table(title="Memory of weights by role, MiB (shared storage holds one base)")
    for name in (
        "storage",
        "student",
        "fake_score",
        "teacher_score",
        "student_ema",
        "sum",
        "measured",
    ):
        table.add_column(name, justify="left" if name == "storage" else "right")
    for storage in ("independent", "shared_base"):
        roles = digits_worker(storage).roles
        sizes = [
            sum(p.numel() * p.element_size() for p in r.tensors) / 2**20 for r in roles.values()
        ]
        cells = [*sizes, sum(sizes), allocated(roles) / 2**20]
        table.add_row(storage, *(f"{size:.2f}" for size in cells))
    return table
