"""The command line: train, encode, sample, evaluate, export, inspect, plan."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, final

import typer
from rich.console import Console
from typer.core import TyperCommand

from fewstep.errors import INTERRUPTED, TrainingError, UserError

if TYPE_CHECKING:  # these import torch, which takes seconds
    from fewstep.launch.processes import Ended

app = typer.Typer(
    name="fewstep",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Distil a diffusion or flow-matching teacher into a student of one to eight steps.\n\n"
    "A [bold]recipe[/bold] (one YAML file) says everything about a run. Train a teacher, distil "
    "it, sample and evaluate the student, and export it to plain diffusers:\n\n"
    "  fewstep train recipes/digits/teacher.yaml\n\n"
    "  fewstep train recipes/digits/student.yaml\n\n"
    "  fewstep sample runs/digits/student --out digits.png\n\n"
    "  fewstep export runs/digits/student",
)
console = Console()
errors = Console(stderr=True)

DEVICE = "As in cuda or cpu; by default where it was trained, or the CPU if that is not here."
UNTOUCHED = "interrupted; what was saved before is untouched"


@final
class TrainCommand(TyperCommand):
    """`train`, whose `--resume` may have a value, or none."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Write `--resume VALUE` as one word, and `--resume` alone as one that is empty."""
        words, left = [], list(args)
        while left:
            word = left.pop(0)
            if word == "--resume":
                following = left[0] if left else "-"
                other = following.startswith("-") or "=" in following or Path(following).is_file()
                word = "--resume=" if other else f"--resume={left.pop(0)}"
            words.append(word)
        return super().parse_args(ctx, words)


@app.command(cls=TrainCommand)
def train(
    recipe: Annotated[Path, typer.Argument(help="The recipe, a YAML file.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Values that replace those of the recipe, with dots between the parts of a key: "
            "train.cycles=100 optimizers.student.lr=1e-4",
        ),
    ] = None,
    run_dir: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="Where to write the run, instead of the recipe's."),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            "--resume",
            metavar="(auto)",
            help="Alone: go on from the latest checkpoint in run_dir. `--resume auto`: go on if "
            "there is one, start anew if not.",
        ),
    ] = None,
) -> None:
    """Run a recipe: train a teacher or distil a student.

    The run directory gets the resolved recipe, metrics (metrics.jsonl and TensorBoard) and
    checkpoints. [bold]Ctrl-C[/bold] finishes the current cycle, saves, says how to go on, and
    exits with 130; a second one stops at once. [bold]SIGTERM[/bold], which schedulers send, does
    the same and exits with 143. A resumed run gives the same weights, bit for bit, as one that
    was never stopped.

    [bold]launch.processes=N[/bold] runs it in N processes, one for each device;
    [bold]launch.kind=ray[/bold] runs it on a Ray cluster.
    """
    from fewstep.config import load_recipe
    from fewstep.launch import command
    from fewstep.progress import training_progress
    from fewstep.training.loop import StopRequest

    arguments = [str(recipe), *(overrides or [])]
    loaded, resumed = load_recipe(recipe, overrides or []), command.parse_resume(resume)
    if run_dir is not None:
        if not run_dir.strip():
            raise UserError("--run-dir: is empty; name a directory")
        # Taken as it is: as an override it would be read as YAML.
        loaded = loaded.model_copy(update={"run_dir": run_dir})
        arguments += ["--run-dir", run_dir]
    end_with(command.run_in_processes(loaded, resumed, arguments))
    command.hush(console)
    stop = StopRequest()
    with training_progress(console, f"{loaded.method.name}", loaded.train.cycles) as on_cycle:
        run = command.run_recipe(loaded, resumed, on_cycle, stop)
    for line in command.last_words(run, arguments):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    raise typer.Exit(command.leave_together(run, stop))


@app.command()
def encode(
    recipe: Annotated[Path, typer.Argument(help="The recipe, a YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="As for train.")
    ] = None,
    overwrite: Annotated[
        bool,
        typer.Option("--overwrite", help="Begin anew: remove the encoded data that are there."),
    ] = False,
) -> None:
    """Encode the prompts and images of a recipe, once, for all runs on them.

    Text encoders and autoencoder are needed here alone: a run reads what is written into
    [bold]data.encoded[/bold]. What was stopped goes on where it was, and what is complete is
    checked, every byte of it. [bold]launch.processes=N[/bold] shares the work.
    """
    from fewstep.config import load_recipe
    from fewstep.launch import command
    from fewstep.launch import encode as encoding
    from fewstep.progress import encoding_progress

    given = overrides or []
    loaded = load_recipe(recipe, given)
    arguments = [str(recipe), *given, *(["--overwrite"] if overwrite else [])]
    end_with(encoding.encode_in_processes(loaded, arguments))
    command.hush(console)
    with encoding_progress(console) as on_progress:
        encoded = encoding.encode(loaded, overwrite=overwrite, on_progress=on_progress)
    for line in encoding.summary(encoded, recipe, given):
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    encoding.leave_encoding()


@app.command()
def sample(
    source: Annotated[Path, typer.Argument(help="A run directory or an export.")],
    out: Annotated[
        Path,
        typer.Option(
            help="name.png: a grid; name.safetensors: the tensor; else a new folder of PNGs."
        ),
    ] = Path("samples.png"),
    steps: Annotated[
        int | None,
        typer.Option(min=1, max=1000, help="Steps; by default those it was trained for."),
    ] = None,
    classes: Annotated[
        str | None,
        typer.Option(help="Class labels, as in 3,1,4 or 0-9; by default each class in turn."),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Text-to-image networks: a text file, one prompt a line."),
    ] = None,
    prompt: Annotated[
        list[str] | None, typer.Option(help="Text-to-image networks: a prompt; may be repeated.")
    ] = None,
    count: Annotated[
        int | None,
        typer.Option(min=1, help="Number of samples; by default one a class or prompt, or 16."),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the noise: same seed, same samples.")] = 0,
    which: Annotated[
        Literal["latest", "best"] | None,
        typer.Option(help="Checkpoint of a run; by default the best, if it was validated."),
    ] = None,
    role: Annotated[
        str | None,
        typer.Option(
            help="Whose network; by default student_ema where there is one. teacher_score is "
            "sampled with the guidance that it teaches with, in 50 steps unless --steps is given."
        ),
    ] = None,
    device: Annotated[str | None, typer.Option(help=DEVICE)] = None,
) -> None:
    """Sample a run or an export, on the grid that it was trained on."""
    from fewstep.arguments import choose_conditions, read_prompts
    from fewstep.export_description import DESCRIPTION
    from fewstep.images import check_out, write_samples
    from fewstep.source import open_source

    if (role is not None or which is not None) and (source / DESCRIPTION).is_file():
        option = "--role" if role is not None else "--which"
        raise UserError(f"{option}: {source} is an export, which holds one network; leave it out")
    # Before anything that takes long.
    check_out(out)
    given = read_prompts(prompts, prompt or [])
    opened = open_source(source, which, role, device)
    spec = opened.sampler(steps)
    if steps is not None and opened.few_step and spec.sigmas != opened.sampler(None).sigmas:
        trained = opened.sampler(None).steps
        errors.print(f"[yellow]Note:[/yellow] this student was trained for {trained} steps only.")
    conditions = choose_conditions(opened, classes, given, count)
    samples = opened.sample(conditions, spec, seed)
    written = write_samples(samples.images, out)
    console.print(
        f"{written}: {spec.steps} steps, {spec.nfe} network calls each, {samples.seconds:.2f} s",
        markup=False,
    )


@app.command()
def evaluate(
    sources: Annotated[
        list[Path], typer.Argument(help="Run directories or exports; results are named by them.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for evaluation.json, report.html and its pictures."),
    ] = None,
    steps: Annotated[
        str, typer.Option(help="Step counts for teachers, as in 1,2,4; students have their own.")
    ] = "1,2,4,8,16,50",
    samples: Annotated[int, typer.Option(min=16, help="Samples of each.")] = 2000,
    seed: Annotated[int, typer.Option(min=0, help="Of the noise, the same for all.")] = 0,
    teacher: Annotated[
        bool,
        typer.Option(
            "--teacher",
            help="Also the frozen teacher of the first distilled run, with the guidance that it "
            "teaches with, in the steps of --steps.",
        ),
    ] = False,
    features: Annotated[
        Literal["auto", "digits", "raw", "colours", "inception"],
        typer.Option(help="What images are compared by; auto: the digits' classifier, or colours."),
    ] = "auto",
    clip: Annotated[
        str | None,
        typer.Option(help="A CLIP model (directory or hub id): how images fit their prompts."),
    ] = None,
    which: Annotated[
        Literal["latest", "best"] | None,
        typer.Option(help="Checkpoint of a run; by default the best, if it was validated."),
    ] = None,
    device: Annotated[str | None, typer.Option(help=DEVICE)] = None,
) -> None:
    """Compare teachers and students with the real data, on the same noise and classes.

    Prints a table: Fréchet and kernel distance (lower is better), precision, recall, density and
    coverage, class accuracy, network calls (nfe) and seconds. The floor is what one half of the
    real images scores against all of them.
    """
    from fewstep.arguments import parse_numbers
    from fewstep.comparison import count_steps, evaluate_sources, has_figures, write_comparison
    from fewstep.files import check_place
    from fewstep.results import evaluation_table
    from fewstep.source import open_source, open_teacher

    counts = parse_numbers(steps, "--steps", least=1, most=1000)
    if out is not None:
        check_place(out, "--out")
    opened = [open_source(path, which, device=device) for path in sources]
    if teacher:
        opened.append(open_teacher(sources, device))

    def report_row(row: dict[str, Any]) -> None:
        name = f"{row['model']}, {count_steps(row['steps'])}"
        if not has_figures(row):
            console.print(f"{name}: its samples are not finite, and have no figures")
            return
        kind, key = "Fréchet distance", "frechet_distance"
        if key not in row:
            kind, key = "CLIP score", "clip_score"
        console.print(f"{name}: {kind} {row[key]:.4g}", highlight=False)

    document, images = evaluate_sources(
        opened,
        steps=counts,
        samples=samples,
        seed=seed,
        features=features,
        clip=clip,
        on_result=report_row,
    )
    console.print(evaluation_table(document))
    if out is not None:
        page = write_comparison(out, opened, document, images)
        console.print(f"Written: {out / 'evaluation.json'}, {page}", markup=False)


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    role: Annotated[
        Literal["student", "student_ema"] | None,
        typer.Option(help="Whose weights; by default student_ema where there is one."),
    ] = None,
    which: Annotated[
        Literal["latest", "best"] | None,
        typer.Option(help="Checkpoint of a run; by default the best, if it was validated."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory to write; by default RUN/export.")
    ] = None,
    form: Annotated[
        Literal["pipeline", "network", "lora"],
        typer.Option(
            "--format",
            help="pipeline: all that sampling needs; network: without the teacher's text encoders "
            "and autoencoder; lora: the adapter alone.",
        ),
    ] = "pipeline",
    verify: Annotated[
        bool, typer.Option(help="Load it in plain diffusers and compare samples.")
    ] = True,
) -> None:
    """Write a role as a directory that plain diffusers loads, and check it by loading it.

    The directory holds the network, a scheduler, a pipeline with the trained sigmas, and a README
    that says how to sample it. LoRA students are merged; the adapter is there as well.
    """
    from fewstep.config import load_recipe
    from fewstep.export import check_request, export_checked
    from fewstep.pretrained import RECIPE, check_run_directory
    from fewstep.roles.role import STUDENT, STUDENT_EMA
    from fewstep.run import open_run

    check_run_directory(run)
    recipe, out = load_recipe(run / RECIPE), (out or run / "export").resolve()
    check_request(recipe, recipe.model.build(), out, role, form)
    opened = open_run(run, which, roles=(STUDENT, STUDENT_EMA))
    directory = export_checked(opened, out, role, form, verify)
    checked = "plain diffusers gives the same images" if verify else "not compared with diffusers"
    console.print(
        f"Exported {role or opened.result_role} of cycle {opened.cycle} to {directory}; {checked}.",
        markup=False,
    )


@app.command()
def inspect(
    target: Annotated[Path, typer.Argument(help="A recipe, a run directory or a checkpoint.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="As for train.")
    ] = None,
) -> None:
    """Show a recipe or a run: roles and memory, the cycle, what is saved, updates done.

    A checkpoint (RUN/checkpoints/cycle_000100) is checked, every byte of it, and what it holds is
    listed; damage is named.
    """
    from fewstep.checkpoint import is_checkpoint_name, is_complete
    from fewstep.config import load_recipe
    from fewstep.inspection import inspect_checkpoint, inspect_recipe, inspect_run

    if is_checkpoint_name(target.name) or is_complete(target):
        if overrides:
            raise UserError("overrides change recipes; a checkpoint is inspected as it is")
        console.print(inspect_checkpoint(target))
    elif target.is_dir():
        if overrides:
            raise UserError("overrides change recipes; a run is inspected as it is")
        console.print(inspect_run(target))
    else:
        console.print(inspect_recipe(load_recipe(target, overrides or [])))


@app.command()
def plan(
    recipe: Annotated[Path, typer.Argument(help="The recipe, a YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="As for train.")
    ] = None,
    gpus: Annotated[
        str | None,
        typer.Option(
            metavar="NxMEMORY",
            help="Devices that there are, as in 1x80GB or 8x24GiB; exit code 2 if the recipe does "
            "not fit. By default the memory on 1, 2 and 8 is shown.",
        ),
    ] = None,
) -> None:
    """Show who does what in a cycle, on Ray who sits where, and the memory that it takes.

    Nothing is started and no weights are read: the plan of a large run can be looked at anywhere.
    Weights, gradients and optimizers are counted exactly; what comes and goes is estimated.
    """
    from fewstep.config import load_recipe
    from fewstep.memory import parse_devices
    from fewstep.memory_tables import plan_memory
    from fewstep.plan import plan_recipe

    devices = parse_devices(gpus) if gpus is not None else None
    loaded = load_recipe(recipe, overrides or [])
    console.print(plan_recipe(loaded))
    try:
        shown, too_much = plan_memory(loaded, devices)
    except UserError as error:
        if devices is not None:
            raise
        console.print(f"\nMemory: {error}", markup=False, highlight=False)
        return
    console.print("", shown, sep="\n")
    if too_much is not None:
        raise UserError(f"--gpus: {too_much}")


def end_with(ended: Ended | None) -> None:
    """End as the processes of a command have, if it was run by some."""
    if ended is not None:
        for sentence in ended.killed:
            print_error(sentence)
        raise typer.Exit(ended.code)


def print_error(message: str, details: str = "") -> None:
    """Print an error, after details such as a traceback."""
    if details:
        errors.print(details, end="", markup=False, highlight=False, soft_wrap=True)
    errors.print("[bold red]Error:[/bold red]", end=" ")
    errors.print(message, markup=False, highlight=False, soft_wrap=True)


def fail(message: str, code: int, error: BaseException | None = None) -> NoReturn:
    """Print an error without a traceback and exit.

    Of the processes that share a run, the first that fails prints its error, with a traceback
    where nobody has foreseen it. The others have only lost it.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        details = ""
        if error is not None and error.__cause__ is not None:
            details = f"{error.__cause__}\n"
        print_error(message, details)
        sys.exit(code)
    from fewstep.launch import command, processes

    told = command.told_by_another(message, code)
    if told is None:
        print_error(message, command.unforeseen(error) if error is not None else "")
    processes.end_rank(told.code if told is not None else code)


def main() -> None:
    """Run the command line: exit code 2 for a user's mistake, 1 for a run that cannot go on."""
    # What a terminal cannot show, as a file's name that is not UTF-8, must not end a run.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app()
    except UserError as error:
        fail(str(error), 2)
    except TrainingError as error:
        fail(str(error), 1, error)
    except KeyboardInterrupt:
        fail(UNTOUCHED, INTERRUPTED)
    except SystemExit as exit_:
        # Typer turns Ctrl-C into a silent exit, which nothing but its cause tells from others.
        if isinstance(getattr(exit_.__context__, "__cause__", None), KeyboardInterrupt):
            fail(UNTOUCHED, INTERRUPTED)
        raise


if __name__ == "__main__":
    main()
