"""One rank of a trainer group: a process that holds a worker and does what the driver says."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, final

import ray
import torch

from fewstep import files
from fewstep.build import build_worker
from fewstep.checkpoint import (
    MANIFEST,
    Background,
    hold_part,
    load_checkpoint,
    plain_state,
    tensor_paths,
    unread,
    write_held,
    write_part,
)
from fewstep.checkpoint.peers import Peers
from fewstep.config import Recipe
from fewstep.data.items import Items
from fewstep.diffusion.draw import Draw
from fewstep.errors import TrainingError
from fewstep.files import FileEntry
from fewstep.launch.hooks import run_fingerprint
from fewstep.launch.local import load_data
from fewstep.launch.ray.external import Expected, ExternalData, check_external
from fewstep.launch.ray.transport import Portion, pack
from fewstep.launch.ray.underway import Reply
from fewstep.launch.trials import check_network, check_teacher, reporting, teacher_statistics
from fewstep.methods.method import TensorSpec
from fewstep.models.model import Model
from fewstep.parallel.offload import Moved, Offload, held_tensors
from fewstep.parallel.ranks import MeetingPlace, dissolve, meet
from fewstep.pretrained import load_weights
from fewstep.roles.role import STUDENT, TEACHER_SCORE
from fewstep.run import Run, prompts_to_sample
from fewstep.sampling import Samples
from fewstep.training.phase import PhaseRequest
from fewstep.training.timeline import Kind, Span, timed
from fewstep.validation import ValidationSettings, validation_samples
from fewstep.weights import (
    Checksum,
    Confirmation,
    gather_bucket,
    split_into_buckets,
    student_tensors,
    whole_sizes,
)


@final
@dataclass(frozen=True)
class Report:
    """What a rank has come up with: all of a run must agree on where it stands.

    Attributes:
        cycle: the last one that its weights have seen.
        data_position: samples taken from the data so far.
        fingerprint: what must not change between a run and its resume.
        read: mark of the checkpoint that was read, by its content; "" where there is none.
        student_updates: that the student's weights have seen; None where it lives elsewhere.
        reference: moments of the teacher's samples, where the teacher is here.
        tensors: names of its tensors as in a checkpoint.
        unread: what the checkpoint holds and this rank does not.
    """

    cycle: int
    data_position: int
    fingerprint: Mapping[str, Any]
    read: str
    student_updates: int | None
    reference: Mapping[str, float] | None
    tensors: Sequence[str]
    unread: Sequence[str]


@final
class TrainerProcess:
    """One rank of a trainer group. Every method is called on all ranks of the group at once.

    A call may be sent before the one before it has answered. Where it has to wait for another
    group, it is sent with references of what that group gives; they are its last arguments, and
    Ray does not begin before they are there.
    """

    def __init__(self, group: str, rank: int, size: int, recipe: Recipe) -> None:
        """Begin.

        Args:
            group: the name of its group.
            rank: its number in the group.
            size: how many there are.
            recipe: resolved.
        """
        self.lane = f"{group}/{rank}"
        self._rank, self._size, self._recipe = rank, size, recipe
        self._place: MeetingPlace | None = None
        self._buckets: dict[str, list[list[str]]] = {}
        self._failed = False
        # The driver speaks to the user.
        logging.getLogger("fewstep").setLevel(logging.ERROR)
        torch.set_num_threads(recipe.runtime.threads or torch.get_num_threads())

    def open(self) -> tuple[str, int]:
        """Open a place for the group to meet at, on rank 0; address and port."""
        self._place = MeetingPlace(ray.util.get_node_ip_address())
        return self._place.address, self._place.port

    def join(self, address: str, port: int) -> None:
        """Meet the other ranks of the group."""
        self._ranks = meet(
            address,
            port,
            self._rank,
            self._size,
            torch.device(self._recipe.runtime.device),
            self._recipe.launch.timeout_seconds,
        )

    def set_up(
        self,
        roles: Sequence[str],
        model: Model | None,
        dataset: Items | None,
        checkpoint: Path | None,
    ) -> Report:
        """Build the worker, new or from a checkpoint.

        Args:
            roles: that live here.
            model: the adapter of a network of the caller's.
            dataset: of the caller's.
            checkpoint: to go on from.

        Raises:
            UserError: for what the user can put right.
        """
        recipe = self._recipe
        model = model or recipe.model.build()
        data = load_data(recipe, dataset)
        with reporting("model: the network cannot be built"):
            teacher = None if checkpoint else load_weights(recipe, model, self._ranks)
            self._worker = build_worker(recipe, model, data, teacher, self._ranks, roles)
        check_network(self._worker.roles, recipe.seed)
        if checkpoint is None:
            check_teacher(self._worker.roles, recipe.seed, data)
        left, cycle, read = [], 0, ""
        if checkpoint is not None:
            into = partial(self._worker.empty_state, partial=True)
            state = load_checkpoint(checkpoint, into, self._ranks, partial=True)
            self._worker.load_state_dict(state, partial=True)
            read = files.digest(checkpoint / MANIFEST)
            cycle = int(state["cycle"])
        held = self._worker.state_dict()  # once: FSDP1 puts every tensor together for it
        tensors = tensor_paths(held)
        if checkpoint is not None:
            left = unread(checkpoint, held)
        del held
        self._behind = Background(self._ranks, recipe.launch.timeout_seconds)
        self._offload = Offload(
            self._ranks.device, lambda: held_tensors(self._worker.roles, self._worker.sharding)
        )
        self._items = prompts_to_sample(recipe, model, dataset)
        run = Run(Path(recipe.run_dir), recipe, self._worker, cycle, items=self._items)
        student = self._worker.roles.get("student")
        return Report(
            cycle,
            cycle * recipe.train.batch_size,
            run_fingerprint(recipe, self._worker),
            read,
            student.successful if student is not None else None,
            teacher_statistics(run),
            tensors,
            left,
        )

    def base(self) -> Confirmation | None:
        """The frozen base that the roles rest on, by its checksum; None where there is none."""
        worker = self._worker
        if worker.roles.storage.kind == "independent":
            return None
        checksum = Checksum()
        for name in student_tensors(worker.roles, TEACHER_SCORE):
            checksum.add(name, gather_bucket(worker, TEACHER_SCORE, [name])[name])
        return checksum.confirmation(version=0)

    def run_phase(
        self, request: PhaseRequest, given: ExternalData | None, versions: range, *_: object
    ) -> Reply:
        """Run a phase (see `Worker.run_phase`); what other processes have computed is checked.

        Args:
            request: the phase.
            given: for this rank's samples.
            versions: student updates that may be behind it.
        """
        spans: list[Span] = []
        with self._in_turn(), self._timed(spans, request.name, "train", request.cycle):
            if given is not None:
                tensors = self._worker.method.external_tensors(
                    request.role, self._worker.roles.model, self._worker.roles.dtype
                )
                request = self._take(request, given, versions, tensors, spans)
            result = self._worker.run_phase(request)
        return Reply(result, tuple(spans))

    def score(
        self, request: PhaseRequest, given: ExternalData, versions: range, *_: object
    ) -> tuple[Reply, ExternalData]:
        """Score student samples for a phase of a later group (see `Worker.score`)."""
        spans: list[Span] = []
        name = f"score {request.name}"
        with self._in_turn(), self._timed(spans, name, "score", request.cycle):
            roles = self._worker.roles
            x0 = {"x0": TensorSpec(roles.model.sample_shape, roles.dtype)}
            request = self._take(request, given, versions, x0, spans)
            found = {key: value.cpu() for key, value in self._worker.score(request).items()}
        return Reply(None, tuple(spans)), replace(given, tensors=found)

    def validation_samples(self, settings: ValidationSettings) -> Samples | None:
        """See `validation.validation_samples`; rank 0 alone gives them away."""
        spec = self._worker.method.sampler()
        roles, items = self._worker.roles, self._items
        samples = validation_samples(settings, roles, spec, items, self._ranks)
        return samples if self._ranks.first else None

    def write(
        self, draft: Path, part: str, skipped: Collection[str], cycle: int, behind: bool
    ) -> Reply:
        """Write this group's tensors into a checkpoint in the making.

        Args:
            draft: the directory.
            part: the group's folder in it.
            skipped: tensors that another group writes.
            cycle: the last one completed.
            behind: in the background, from copies.

        Returns:
            The state that is no tensor; `written` gives the files.
        """
        spans: list[Span] = []
        with self._timed(spans, "save", "save", cycle):
            state, left = self._worker.state_dict(), set(skipped)
            paths = [path for path in tensor_paths(state) if path not in left]
            if behind:
                held = hold_part(draft, part, state, paths, Peers(self._ranks), copies=True)
                self._files = self._behind.submit(lambda own: write_held(draft, part, held, own))
            else:
                self._files = Future()
                self._files.set_result(write_part(draft, part, state, paths, self._ranks))
        return Reply(plain_state(state), tuple(spans))

    def is_written(self) -> bool:
        """Whether what `write` has begun is finished here."""
        return self._files.done()

    def written(self) -> Mapping[str, FileEntry]:
        """The files of all ranks that `write` has given rise to, once they are finished."""
        return self._files.result()

    # Taking turns on the accelerator.

    def sleep(self, cycle: int, *_: object) -> Reply:
        """Move weights and optimizers to main memory."""
        return self._move("sleep", self._offload.sleep, cycle)

    def wake(self, cycle: int, *_: object) -> Reply:
        """Move them back."""
        return self._move("wake", self._offload.wake, cycle)

    def resident_bytes(self) -> int:
        """Bytes of weights and optimizers that are on the accelerator now."""
        return self._offload.resident_bytes

    # Giving weights to the rollout workers.

    def portions(self, role: str, bucket_mib: int) -> int:
        """In how many portions a role's weights are given away."""
        self._buckets[role] = split_into_buckets(
            whole_sizes(self._worker, role), bucket_mib * 2**20
        )
        return len(self._buckets[role])

    def push(self, role: str, portion: int, cycle: int, *_: object) -> tuple[Reply, Portion | None]:
        """One portion, whole, in main memory; of rank 0 alone, the others help to gather it.

        Args:
            role: whose.
            portion: its number; they are asked for in order.
            cycle: for the timeline.

        Returns:
            With the last portion the confirmation of all, to compare with what receivers hold.
        """
        spans: list[Span] = []
        if portion == 0:
            self._checksum = Checksum()
        with self._in_turn(), self._timed(spans, "gather", "push", cycle):
            tensors = gather_bucket(self._worker, role, self._buckets[role][portion])
            if not self._ranks.first:
                return Reply(None, tuple(spans)), None
            for name, tensor in tensors.items():
                self._checksum.add(name, tensor)
        size = sum(t.nbytes for t in tensors.values())
        last = portion + 1 == len(self._buckets[role])
        version = self._worker.roles[STUDENT].successful
        sent = self._checksum.confirmation(version) if last else None
        spans = [replace(span, bytes=size) for span in spans]
        return Reply(sent, tuple(spans)), Portion(version, pack(tensors))

    def leave(self) -> None:
        """Take leave of the other ranks."""
        dissolve()

    def _take(
        self,
        request: PhaseRequest,
        given: ExternalData,
        versions: range,
        tensors: Mapping[str, TensorSpec],
        spans: list[Span],
    ) -> PhaseRequest:
        """The request with what was computed for it elsewhere, checked, on this device."""
        with self._timed(spans, "hand-off", "hand_off", request.cycle, given.nbytes):
            size = self._recipe.train.batch_size
            draw = Draw(self._recipe.seed, request.cycle, request.rollout)
            ids = self._worker.batches.batch(draw, size, self._ranks.share(size)).sample_ids
            expected = Expected(request.cycle, request.rollout, self._rank, versions, ids, tensors)
            with self._worker.placing_errors(request):
                check_external(given, expected)
            device = self._ranks.device
            external = {key: value.to(device) for key, value in given.tensors.items()}
            return replace(request, external=external)

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        """Do what was sent, unless this rank has failed at something that was sent before it.

        The others of its group may hang in that; they must not go on with half of another thing.
        """
        if self._failed:
            raise TrainingError("not done, as an earlier call has failed here")
        try:
            self._offload.require_awake("what was asked for")
            yield
        except BaseException:
            self._failed = True
            raise

    def _move(self, name: str, move: Callable[[], Moved], cycle: int) -> Reply:
        start = time.time()
        moved = move()
        span = Span(name, self.lane, "offload", cycle, start, moved.seconds, moved.bytes)
        return Reply(None, (span,))

    def _timed(
        self, spans: list[Span], name: str, kind: Kind, cycle: int, size: int = 0
    ) -> AbstractContextManager[None]:
        return timed(spans.append, name, self.lane, kind, cycle, size)
