"""Matrix products by our own Triton kernels: tile and grid are known, and only the schedule differs between them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quantbench.kernels.gemm import GemmPlan, plan
from quantbench.kernels.gemm.host import missing_format
from quantbench.kernels.launching import INTERPRETER, unsupported_architecture, wrong_in_interpreter
from quantbench.providers.base import Task
from quantbench.providers.inputs import Inputs
from quantbench.workload import Gemm

if TYPE_CHECKING:
    import torch

    from quantbench.device.spec import DeviceSpec
    from quantbench.launch import Launch, Tile
    from quantbench.workload import Workload


class TritonGemmTask:
    """One planned product."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor, work: GemmPlan) -> None:
        self._a = a
        self._b = b
        self._work = work

    def run(self) -> None:
        """Enqueue the kernel (for split-k: and the one that adds up the parts)."""
        self._work.run()

    def outputs(self) -> tuple[torch.Tensor, ...]:
        """c[m, n], or c[batch, m, n]."""
        return (self._work.out,)

    def inputs(self) -> tuple[torch.Tensor, ...]:
        """a and b. fp8 operands count as they are stored."""
        return (self._a, self._b)

    def launch(self) -> Launch | None:
        """Exactly what runs; None in the interpreter, where nothing is launched."""
        return None if INTERPRETER else self._work.launch


class _TritonGemm:
    """What the four schedules share. tile: for every product; None picks one from the menu for each (see
    `quantbench.kernels.gemm.menu.pick`). autotune: None's pick is timed instead of estimated."""

    id: str
    schedule: str
    kind = "gemm"

    def __init__(self, tile: Tile | None = None, *, autotune: bool = False) -> None:
        self._tile = tile
        self._autotune = autotune

    def unsupported(self, workload: Workload, device: DeviceSpec) -> str | None:
        """From the format and the device. V100 and T4 are refused under triton 3.3 and newer, which make no
        tensor-core code for them."""
        if not isinstance(workload, Gemm):
            return f"{self.id} runs matrix products, not {workload.kind}"
        if workload.dtype == "int8":
            return f"{self.id} does not take int8"
        reason: str | None
        if INTERPRETER:
            reason = wrong_in_interpreter(workload.dtype)
            return reason
        if device.compute_capability is None:
            return f"{self.id} needs a CUDA GPU, or TRITON_INTERPRET=1 set to run in triton's interpreter"
        capability = device.compute_capability
        reason = unsupported_architecture(capability) or missing_format(workload.dtype, capability)
        return reason

    def prepare(self, workload: Workload, device: DeviceSpec, *, distribution: str = "normal", seed: int = 0) -> Task:
        """Operands as the layout stores them, a contiguous c, the kernel compiled."""
        assert isinstance(workload, Gemm)
        a, b = Inputs(device, distribution, seed).gemm_operands(workload)
        work = plan(
            a, b, tile=self._tile, schedule=self.schedule, tf32=workload.dtype == "tf32", autotune=self._autotune
        )
        return TritonGemmTask(a, b, work)


class TritonDataParallel(_TritonGemm):
    """One block per tile: the schedule whose waves are the cliff."""

    id = "triton.data_parallel"
    schedule = "data_parallel"


class TritonSplitK(_TritonGemm):
    """Several blocks per tile, along the reduction, and a second kernel that adds up their parts."""

    id = "triton.split_k"
    schedule = "split_k"


class TritonStreamK(_TritonGemm):
    """One wave of blocks that share the last tiles evenly by reduction steps: the cliff flattened."""

    id = "triton.stream_k"
    schedule = "stream_k"


class TritonPersistent(_TritonGemm):
    """One wave of blocks that compute tile after tile."""

    id = "triton.persistent"
    schedule = "persistent"
