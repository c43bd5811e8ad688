"""Command `devices`: prints this machine's device, its state, what disturbs timings, and the known
GPUs.

Entry points: `devices`, loaded by `app`; `device_lines`, also used by the command `sweep`;
`device_line` (name, SMs and memory), used by `advise` and by the commands about stored results.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import typer
from rich.table import Table

from quantbench import device
from quantbench.cli.options import command, json_option
from quantbench.cli.output import StyledLine, plain_table, print_result, warning
from quantbench.device import diagnosis
from quantbench.device.diagnosis import Finding, Machine, refusal
from quantbench.device.here import warnings_for
from quantbench.device.nvml import Absent, Limits
from quantbench.device.spec import DeviceSpec, DeviceState

_DTYPES = ("fp16", "bf16", "tf32", "fp32", "fp8", "nvfp4", "mxfp4", "int8")


@command
def devices(as_json: bool = json_option()) -> None:
    """Show the device of this machine, its state, what may disturb timings, and the known GPUs.

    Ends with exit code 1 if the machine has a GPU that cannot be measured; the table says why.
    """
    machine = device.inspect_machine()
    findings = () if machine is None or not machine.card else tuple(_findings(machine))
    if machine is not None and refusal(machine):
        _refused(findings, as_json=as_json)
        raise typer.Exit(1)
    spec = device.current()
    state = device.monitor(spec)()
    nvml = device.open_nvml() if spec.kind == "cuda" else Absent("no GPU is used")
    limits = None if isinstance(nvml, Absent) else nvml.limits()
    dtype = device.default_dtype(spec)

    answer = {
        "device": spec,
        "default_dtype": dtype,
        "state": state,
        "limits": limits,
        "warnings": warnings_for(spec, state, limits),
        "diagnosis": findings,
        "known": device.known(),
    }
    table: list[StyledLine | Table] = [_findings_table(findings), ""] if findings else []
    lines = (
        *device_lines(spec, state, limits),
        f"{dtype} is measured by default",
        "",
        *table,
        _known_table(spec.name),
    )
    sources = (
        "From sm_80 on, bf16 is as fp16, tf32 half. AMD's: gfx for sm_, compute units for SMs. Sources: quantbench "
        "devices --json"
    )
    print_result(as_json, lambda: answer, (*lines, sources))


def _refused(findings: Sequence[Finding], *, as_json: bool) -> None:
    """Prints why the card cannot be measured, and the known GPUs."""
    answer = {"device": None, "diagnosis": findings, "known": device.known()}
    print_result(as_json, lambda: answer, [_findings_table(findings), "", _known_table("")])


def _findings(machine: Machine) -> Iterator[Finding]:
    """Yields the lines of the diagnosis, the verdict last."""
    yield from diagnosis.findings(machine)
    yield _triton(machine)
    error = refusal(machine)
    if error is None:
        yield Finding("verdict", "this card can be measured")
    else:
        yield Finding("verdict", "this card cannot be measured", f"needed: {error.expected}")


def _triton(machine: Machine) -> Finding:
    try:
        from quantbench.kernels.launching import TRITON, unsupported_architecture
    except ImportError:
        return Finding("triton", "none", "our kernels cannot run")
    problem = unsupported_architecture(machine.capability) if machine.capability else None
    return Finding("triton", ".".join(map(str, TRITON)), problem or "")


def _findings_table(findings: Sequence[Finding]) -> Table:
    rows = [(finding.what, finding.found, finding.problem or "ok") for finding in findings]
    return plain_table(("", "found", "verdict"), rows, title="This machine's GPU", fold=("found",))


def device_lines(
    spec: DeviceSpec, state: DeviceState, limits: Limits | None = None
) -> Iterator[StyledLine]:
    """Yields lines on the device, its state, and what disturbs its timings."""
    yield device_line(spec)
    yield f"dense peak: {peaks_line(spec)}"
    yield f"state: {state_line(state, limits)}"
    yield from map(warning, warnings_for(spec, state, limits))
    if spec.kind == "cpu":
        yield (
            "This is a CPU: its own steps can be measured here. GPU cliffs need a GPU, `quantbench import` or "
            "`quantbench predict`."
        )


def device_line(spec: DeviceSpec) -> str:
    """Describes the device in one line: `h200-sxm-141gb: 132 SMs (sm_90), 141 GiB at 4800 GB/s, 60
    MiB of L2`.
    """
    memory = f"{spec.memory_bytes / 2**30:.0f} GiB"
    if spec.kind == "cpu":
        return (
            f"{spec.name}: one core of it, {spec.l2_bytes / 2**20:.0f} MiB of last-level cache, {memory} of memory"
            f" at up to {spec.memory_gb_per_s:.0f} GB/s"
        )
    units = f"{spec.sm_count} {'CUs' if spec.kind == 'rocm' else 'SMs'} ({spec.architecture})"
    least = "up to " if "upper bound" in spec.source.get("memory_gb_per_s", "") else ""
    speed = f"{least}{spec.memory_gb_per_s:.0f} GB/s"
    return (
        f"{spec.name}: {units}, {memory} at {speed}, {least}{spec.l2_bytes / 2**20:.0f} MiB of L2"
    )


def peaks_line(spec: DeviceSpec) -> str:
    """Formats the dense peaks with their clock: `bf16 989, tf32 495, fp32 66.9 TFLOP/s at 1830 MHz`
    (CPU: GFLOP/s).
    """
    unit, scale = ("GFLOP/s", 1e3) if spec.kind == "cpu" else ("TFLOP/s", 1)
    if not spec.peak_tflops:
        return "unknown"
    peaks = ", ".join(
        f"{d} {_three_digits(spec.peak_tflops[d] * scale)}"
        for d in _DTYPES
        if d in spec.peak_tflops
    )
    bound = " (upper bounds)" if spec.kind == "cpu" else "" if spec.registered else " (estimated)"
    own_clocks = "".join(f" ({dtype} at {mhz:.0f})" for dtype, mhz in spec.peak_clock_mhz.items())
    return f"{peaks} {unit} at {spec.sm_clock_mhz:.0f} MHz{own_clocks}{bound}"


def state_line(state: DeviceState, limits: Limits | None) -> str:
    """Formats clocks, temperature, power and other processes, as far as known."""
    parts = []
    if state.sm_clock_mhz is not None:
        highest = f" of {limits.max_sm_clock_mhz:.0f}" if limits and limits.max_sm_clock_mhz else ""
        parts.append(f"clock {state.sm_clock_mhz:.0f}{highest} MHz")
    if state.memory_clock_mhz is not None:
        parts.append(f"memory clock {state.memory_clock_mhz:.0f} MHz")
    if state.temperature_c is not None:
        parts.append(f"{state.temperature_c:.0f} °C")
    if state.power_w is not None:
        cap = f" of {limits.power_limit_w:.0f}" if limits and limits.power_limit_w else ""
        parts.append(f"{state.power_w:.0f}{cap} W")
    if state.throttle_reasons:
        parts.append("clock set by " + ", ".join(state.throttle_reasons))
    if state.other_processes is not None:
        parts.append(
            f"{state.other_processes or 'no'} other process{'es' if state.other_processes > 1 else ''}"
        )
    if limits is not None and limits.driver_version:
        parts.append(f"driver {limits.driver_version}")
    if state.note:
        parts.append(state.note)
    return ", ".join(parts) or "nothing is known"


def _known_table(here: str) -> Table:
    """Tabulates the known GPUs in 80 columns."""
    columns = (
        "slug",
        ">sm_",
        ">SMs",
        ">clock",
        ">memory",
        ">L2",
        ">fp16",
        ">fp32",
        ">fp8",
        ">int8",
    )
    table = plain_table(
        columns, title="Known GPUs: clock in MHz, memory in GB/s, L2 in MiB, dense peaks in TFLOP/s"
    )
    for spec in device.known():
        peaks = [spec.peak(dtype) for dtype in ("fp16", "fp32", "fp8", "int8")]
        table.add_row(
            spec.name,
            re.sub("^(sm_|gfx)", "", spec.architecture),
            str(spec.sm_count),
            f"{spec.sm_clock_mhz:.0f}",
            f"{spec.memory_gb_per_s:.0f}",
            f"{spec.l2_bytes / 2**20:g}",
            *("–" if peak is None else _three_digits(peak) for peak in peaks),
            style="bold" if spec.name == here else None,
        )
    return table


def _three_digits(value: float) -> str:
    """Formats three significant digits without an exponent: 989, 62.5, 0.32."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
