"""Command `sweep`: measures workloads over a grid of sizes, on this machine or a Ray cluster."""

from pathlib import Path

from quantbench.cli.options import command, json_option, results_option
from quantbench.cli.output import Result
from quantbench.cli.sweep_options import RUN, SweepArguments, check_words, run_option
from quantbench.errors import InputError


@command
def sweep(
    arguments: SweepArguments,
    on: str = run_option("", "ray: measure on every GPU of a Ray cluster, one run per kind."),
    results: Path = results_option(RUN),
    resume: Path | None = run_option(None, "Folder of an unfinished run to finish."),
    dry_run: bool = run_option(False, "Print the points and the estimated time; measure nothing."),
    gpu: str = run_option("", "GPU to plan for, with --dry-run."),
    as_json: bool = json_option(),
) -> Result:
    """Time real matmuls, softmax and attention on the device at hand, and keep every sample."""
    from quantbench.cli import sweep_run

    if dry_run:
        beside = f"--on {on}" if on else f"--resume {resume}"
        if on or resume is not None:
            raise InputError("sweep", f"--dry-run with {beside}", "one of them")
        return sweep_run.dry_run(arguments, gpu)
    check_words(arguments, on, resume, gpu)
    run = sweep_run.run_on_ray if on else sweep_run.run
    return run(arguments, results, resume, as_json=as_json)
