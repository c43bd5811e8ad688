"""Providers that misbehave, for tests of the worker process; a sweep names them
`tests.fake_providers:Class`.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from typing import ClassVar

import torch

from quantbench import device
from quantbench.device.spec import DeviceSpec
from quantbench.errors import UnsupportedError
from quantbench.launch import Tile
from quantbench.providers.inputs import Inputs
from quantbench.timing import cpu
from quantbench.workload import Gemm, Workload

#: names the file that holds `Held` up; the sizes that it sees before that
HOLD, HELD_AFTER = "QUANTBENCH_TEST_HOLD", 24


class _Task:
    """A product in fp32."""

    def __init__(self, workload: Gemm, device: DeviceSpec, seed: int) -> None:
        self._a, self._b = Inputs(device, seed=seed).operands(workload)
        self._out = torch.empty(workload.m, workload.n)

    def run(self) -> None:
        torch.mm(self._a, self._b, out=self._out)

    def outputs(self) -> tuple[torch.Tensor, ...]:
        return (self._out,)

    def inputs(self) -> tuple[torch.Tensor, ...]:
        return (self._a, self._b)

    def launch(self) -> None:
        return None


class Good:
    """Does what it should."""

    id = "tests.fake_providers:Good"

    def unsupported(self, workload: Workload, device: DeviceSpec) -> str | None:
        return None

    def prepare(
        self, workload: Workload, device: DeviceSpec, *, distribution: str = "normal", seed: int = 0
    ) -> _Task:
        assert isinstance(workload, Gemm)
        return _Task(workload, device, seed)


def _even(workload: Workload) -> bool:
    return getattr(workload, "n", 0) % 2 == 0


class Tiled(Good):
    """Declares its tile."""

    tile = Tile(16, 16)


class Picky(Good):
    def unsupported(self, workload: Workload, device: DeviceSpec) -> str | None:
        return None if _even(workload) else "odd n is not supported"


class PickyLate(Good):
    def prepare(self, workload, device, *, distribution="normal", seed=0):  # type: ignore[no-untyped-def]
        if not _even(workload):
            raise UnsupportedError("PickyLate", f"n = {workload.n}", "an even n")
        return _Task(workload, device, seed)


class SaysNo(Good):
    def unsupported(self, workload, device):  # type: ignore[no-untyped-def]
        return None if _even(workload) else False


class NoTask(Good):
    def prepare(self, workload, device, *, distribution="normal", seed=0):  # type: ignore[no-untyped-def]
        return _Task(workload, device, seed) if _even(workload) else None


class Launches(Good):
    def prepare(self, workload, device, *, distribution="normal", seed=0):  # type: ignore[no-untyped-def]
        task = _Task(workload, device, seed)
        if not _even(workload):
            task.launch = lambda: (64, 64)  # type: ignore[assignment,method-assign]
        return task


class Wrong(Good):
    """Computes something else."""

    id = "tests.fake_providers:Wrong"

    def prepare(self, workload, device, *, distribution="normal", seed=0):  # type: ignore[no-untyped-def]
        task = _Task(workload, device, seed)
        task.run = lambda: torch.mm(2 * task._a, task._b, out=task._out)  # type: ignore[method-assign]
        return task


class Held(Good):
    """Products in fp32 as they are asked for; after HELD_AFTER sizes it waits while the file that
    HOLD names is there, so that a test can stop a sweep that is surely not finished."""

    id = "tests.fake_providers:Held"
    _sizes: ClassVar[set[int]] = set()

    def prepare(self, workload, device, *, distribution="normal", seed=0):  # type: ignore[no-untyped-def]
        self._sizes.add(workload.n)
        while len(self._sizes) > HELD_AFTER and os.path.exists(os.environ.get(HOLD, "")):
            time.sleep(0.01)
        return _Task(workload, device, seed)


class GivesNan(Good):
    """Computes what is not a number."""

    id = "tests.fake_providers:GivesNan"

    def prepare(self, workload, device, *, distribution="normal", seed=0):  # type: ignore[no-untyped-def]
        task = _Task(workload, device, seed)
        task.run = lambda: task._out.fill_(torch.nan)  # type: ignore[method-assign]
        return task


class _OnRun(Good):
    def act(self) -> None:
        raise AssertionError

    def prepare(self, workload, device, *, distribution="normal", seed=0):  # type: ignore[no-untyped-def]
        task = _Task(workload, device, seed)
        # Only odd sizes misbehave, so that the points beside them show that the sweep goes on.
        if not _even(workload):
            task.run = self.act  # type: ignore[method-assign]
        return task


class Segfault(_OnRun):
    def act(self) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)


class Exits(_OnRun):
    def act(self) -> None:
        print("something went badly wrong", file=sys.stderr, flush=True)
        os._exit(7)


#: what torch says on a GPU that it was not built for
NO_KERNEL_IMAGE = """CUDA error: no kernel image is available for execution on the device
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""


class NoKernelImage(Good):
    """Comes with a device on which no timer can be made."""

    def __init__(self) -> None:
        def broken(*_: object) -> None:
            raise RuntimeError(NO_KERNEL_IMAGE)

        cpu.CpuTimer = broken  # type: ignore[assignment,misc]


class NoContext(Good):
    """Comes with a device that gives no context."""

    def __init__(self) -> None:
        def broken() -> None:
            raise RuntimeError(
                "CUDA error: out of memory\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1"
            )

        device.current = broken  # type: ignore[assignment]


class Raises(_OnRun):
    def act(self) -> None:
        raise KeyError("a bug in the provider")


class NoPython(_OnRun):
    """Is compiled where Python.h is missing, as triton's launchers are: from another temporary file
    each time.
    """

    def act(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            source = os.path.join(folder, "main.c")
            words = f"{source}:1:10: fatal error: Python.h: No such file or directory"
            subprocess.check_call(["/bin/sh", "-c", 'echo "$0" >&2; exit 1', words])


class NoCompiler(_OnRun):
    def act(self) -> None:
        subprocess.check_call(["/nowhere/gcc"])


class TritonErrors(_OnRun):
    """Raises as triton's two compilers do, whose exceptions are no RuntimeErrors."""

    def act(self) -> None:
        raise type("PTXASError", (Exception,), {})(
            "PTXAS error: Internal Triton PTX codegen error\n`ptxas` stderr:\n"
            "ptxas fatal   : Value 'sm_121a' is not defined for option 'gpu-name'\n\nRepro command: ptxas -v\n"
        )


class Unlaunched(_OnRun):
    """Fails as a Triton kernel does on a machine without a GPU."""

    def act(self) -> None:
        sys.modules["triton"] = torch
        raise RuntimeError("0 active drivers")


class Exiting(_OnRun):
    """Ends the worker with a traceback that torch's advice follows."""

    def act(self) -> None:
        traceback = "Traceback (most recent call last):\n  File x\ntorch.AcceleratorError: "
        print(traceback + NO_KERNEL_IMAGE, file=sys.stderr, flush=True)
        os._exit(1)


class OutOfMemory(_OnRun):
    def act(self) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 99 GiB")


class IllegalAccess(_OnRun):
    def act(self) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


class Hangs(_OnRun):
    def act(self) -> None:
        time.sleep(3600)
