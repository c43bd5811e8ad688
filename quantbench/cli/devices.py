"""Command `devices`: prints this machine's device with its state, and the known GPUs.

The command also diagnoses whether the machine's GPU can be measured. Other commands use
`device_line` and `device_lines` to describe their device.
"""

import re
from collections.abc import Iterator

from rich.table import Table

from quantbench import device
from quantbench.cli.options import command
from quantbench.cli.output import Lines, Result, StyledLine, plain_table, warning
from quantbench.device import diagnosis
from quantbench.device.diagnosis import Finding, Machine, refusal
from quantbench.device.here import warnings_for
from quantbench.device.nvml import Absent, Limits
from quantbench.device.spec import DeviceSpec, DeviceState

# Dtypes whose peak throughput is printed, in this order.
_DTYPES = ("fp16", "bf16", "tf32", "fp32", "fp8", "nvfp4", "mxfp4", "int8")


@command
def devices() -> Result:
    """Show the device of this machine, its state, what may disturb timings, and the known GPUs.

    Ends with exit code 1 if the machine has a GPU that cannot be measured; the table says why.
    """
    machine = device.inspect_machine()
    findings: list[Finding] = []
    lines: list[StyledLine | Table] = []
    if machine is not None and machine.card:
        findings += _findings(machine)
        rows = [(finding.what, finding.found, finding.problem or "ok") for finding in findings]
        names = ("", "found", "verdict")
        lines += [plain_table(names, rows, title="This machine's GPU", fold=("found",)), ""]
    if machine is not None and refusal(machine):
        refused = {"device": None, "diagnosis": findings, "known": device.known()}
        return Result(refused, (*lines, _known_table("")), exit_code=1)
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
    about = (*device_lines(spec, state, limits), f"{dtype} is measured by default", "")
    sources = (
        "From sm_80 on, bf16 is as fp16, tf32 half. AMD's: gfx for sm_, compute units for SMs. "
        "Sources: quantbench devices --json"
    )
    return Result(answer, (*about, *lines, _known_table(spec.name), sources))


def _findings(machine: Machine) -> Iterator[Finding]:
    """Yields the findings of the diagnosis. The last finding is the verdict."""
    yield from diagnosis.findings(machine)
    yield _triton(machine)
    error = refusal(machine)
    if error is None:
        yield Finding("verdict", "this card can be measured")
    else:
        yield Finding("verdict", "this card cannot be measured", f"needed: {error.expected}")


def _triton(machine: Machine) -> Finding:
    """Returns the finding on Triton: its version, and the problem if it cannot run on the GPU."""
    try:
        from quantbench.kernels.launching import TRITON, unsupported_architecture
    except ImportError:
        return Finding("triton", "none", "our kernels cannot run")
    problem = unsupported_architecture(machine.capability) if machine.capability else None
    return Finding("triton", ".".join(map(str, TRITON)), problem or "")


def device_lines(spec: DeviceSpec, state: DeviceState, limits: Limits | None = None) -> Lines:
    """Yields lines that describe the device, its state, and conditions that disturb timings."""
    yield device_line(spec)
    if spec.kind != "cpu":
        yield f"dense peak: {peaks_line(spec)}"
    yield f"state: {state_line(state, limits)}"
    yield from map(warning, warnings_for(spec, state, limits))
    if spec.kind == "cpu":
        needed = "GPU cliffs need a GPU, `quantbench import` or `quantbench predict`."
        yield f"This is a CPU: its own steps can be measured here. {needed}"


def device_line(spec: DeviceSpec) -> str:
    """Describes a device in one line.

    Example: `h200-sxm-141gb: 132 SMs (sm_90), 141 GiB at 4800 GB/s, 60 MiB of L2`.
    """
    memory = f"{spec.memory_bytes / 2**30:.0f} GiB"
    if spec.kind == "cpu":
        cache = f"{spec.l2_bytes / 2**20:.0f} MiB of last-level cache"
        return f"{spec.name}: one core of it, {cache}, {memory} of memory"
    units = "CUs" if spec.kind == "rocm" else "SMs"
    speed = f"{spec.memory_gb_per_s:.0f} GB/s"
    cache = f"{spec.l2_bytes / 2**20:.0f} MiB of L2"
    return (
        f"{spec.name}: {spec.sm_count} {units} ({spec.architecture}), {memory} at {speed}, {cache}"
    )


def peaks_line(spec: DeviceSpec) -> str:
    """Formats a device's dense peaks, and the SM clock at which they are reached.

    Example: `bf16 989, tf32 495, fp32 66.9 TFLOP/s at 1830 MHz`.
    """
    bound = "" if spec.registered else " (estimated)"
    if not spec.peak_tflops:
        return "unknown"
    known = [dtype for dtype in _DTYPES if dtype in spec.peak_tflops]
    peaks = ", ".join(f"{d} {_three_digits(spec.peak_tflops[d])}" for d in known)
    own_clocks = "".join(f" ({dtype} at {mhz:.0f})" for dtype, mhz in spec.peak_clock_mhz.items())
    return f"{peaks} TFLOP/s at {spec.sm_clock_mhz:.0f} MHz{own_clocks}{bound}"


def state_line(state: DeviceState, limits: Limits | None) -> str:
    """Formats clocks, temperature, power, limits and other processes, without unknown values."""
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
        plural = "es" if state.other_processes > 1 else ""
        parts.append(f"{state.other_processes or 'no'} other process{plural}")
    if limits is not None and limits.driver_version:
        parts.append(f"driver {limits.driver_version}")
    if state.note:
        parts.append(state.note)
    return ", ".join(parts) or "nothing is known"


def _known_table(here: str) -> Table:
    """Tabulates the known GPUs in 80 columns.

    here: name of this machine's device.
    """
    dtypes = ("fp16", "fp32", "fp8", "int8")
    title = "Known GPUs: clock in MHz, memory in GB/s, L2 in MiB, dense peaks in TFLOP/s"
    sizes = (">sm_", ">SMs", ">clock", ">memory", ">L2", ">fp16", ">fp32", ">fp8", ">int8")
    table = plain_table(("slug", *sizes), title=title)
    for spec in device.known():
        table.add_row(
            spec.name,
            re.sub("^(sm_|gfx)", "", spec.architecture),
            str(spec.sm_count),
            f"{spec.sm_clock_mhz:.0f}",
            f"{spec.memory_gb_per_s:.0f}",
            f"{spec.l2_bytes / 2**20:g}",
            *map(_three_digits, map(spec.peak, dtypes)),
            style="bold" if spec.name == here else None,
        )
    return table


def _three_digits(value: float | None) -> str:
    """Formats a value with about three digits and no exponent (989, 62.5, 0.32); None as a dash."""
    if value is None:
        return "–"
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
