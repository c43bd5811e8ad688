"""Provides grouped GEMMs and token permutations, the parts of MoE layers, with torch.

A grouped GEMM multiplies the rows of each expert by the weights of this expert. It runs as a loop
of `torch.mm`, or as one call of torch's `grouped_mm`.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch

from quantbench.providers.inputs import Inputs, output_templates
from quantbench.providers.tasks import BuiltInProvider, ForwardTask, LaunchTask
from quantbench.providers.torch_gemm import gemm_call, unsupported_gemm
from quantbench.workload import GroupedGemm, Permute
from quantbench.workload.dtypes import missing_format

if TYPE_CHECKING:
    from quantbench.device.spec import DeviceSpec

# Sizes must be multiples of this number of bf16 elements, because grouped_mm needs strides that are
# multiples of 16 bytes. For the gradient of the weights, which reduces over the rows of each
# expert, this applies to these rows too. pytorch/torchtitan pads them accordingly
# (TOKEN_GROUP_ALIGN_SIZE_M).
_GROUPED_MM_ALIGN = 8
# Major compute capabilities for which grouped_mm has a kernel (torch 2.13, GroupedBlas.cpp:
# `_grouped_mm_cuda`). On other GPUs, torch copies the offsets to the host and calls one GEMM for
# each expert (GroupedMMUtils.h: `_grouped_mm_fallback`).
_GROUPED_MM_MAJORS = (9, 10)


class TorchGroupedLoop(BuiltInProvider[GroupedGemm]):
    """Grouped GEMMs as a loop (`torch.grouped_loop`): one `torch.mm` for each expert with rows.

    The GEMMs run one after the other, and no rows are padded. For layout tn, the output of an
    expert without rows is set to zero.
    """

    kind = "grouped_gemm"

    def refusal(self, work: GroupedGemm, device: DeviceSpec) -> str | None:
        for gemm in dict.fromkeys(work.gemms):
            if reason := unsupported_gemm(gemm, device):
                return reason
        return None

    def task(self, work: GroupedGemm, device: DeviceSpec, inputs: Inputs) -> LaunchTask:
        a, b = inputs.operands(work)
        c = torch.empty_like(output_templates(work)[0], device=a.device)
        calls: list[Callable[[], object]] = []
        start = 0
        for expert, rows in enumerate(work.tokens_per_expert):
            at = slice(start, start + rows)
            start += rows
            if work.layout != "tn":
                parts = a[at], b[expert], c[at]
            elif rows:
                parts = a[:, at], b[at], c[expert]
            else:
                calls.append(c[expert].zero_)
            if rows:
                calls.append(gemm_call(work.gemm(rows), *parts))

        def run() -> None:
            for call in calls:
                call()

        return LaunchTask(run, (a, b), (c,))


class TorchGroupedMm(BuiltInProvider[GroupedGemm]):
    """Grouped GEMMs in one call (`torch.grouped_mm`), in bf16.

    The function is `torch.nn.functional.grouped_mm`, or `torch._grouped_mm` before torch 2.10. The
    row offsets of the experts are stored on the device, as the function's kernels require.
    """

    kind = "grouped_gemm"

    def refusal(self, work: GroupedGemm, device: DeviceSpec) -> str | None:
        if _grouped_mm() is None:
            names = "torch.nn.functional.grouped_mm nor torch._grouped_mm"
            return f"torch {torch.__version__} has neither {names}"
        if device.kind == "cpu":
            return f"{self.id} is a loop of products on a CPU, as torch.grouped_loop is"
        if work.dtype != "bf16":
            return f"{self.id} takes bf16, not {work.dtype}"
        if device.compute_capability is not None:
            if old := missing_format("bf16", device.compute_capability):
                return old
            major, minor = device.compute_capability
            if major not in _GROUPED_MM_MAJORS:
                return (
                    f"{self.id} has kernels for compute capabilities 9.x and 10.x; on "
                    f"{major}.{minor} it is a loop of products that waits for the host, as "
                    "torch.grouped_loop is without the wait"
                )
        divisible = f"divisible by {_GROUPED_MM_ALIGN}"
        if work.n % _GROUPED_MM_ALIGN or work.k % _GROUPED_MM_ALIGN:
            return f"{self.id} needs n and k {divisible}, not n = {work.n}, k = {work.k}"
        if work.layout == "tn" and any(rows % _GROUPED_MM_ALIGN for rows in work.tokens_per_expert):
            return f"{self.id} needs rows of each expert {divisible} to reduce over them"
        return None

    def task(self, work: GroupedGemm, device: DeviceSpec, inputs: Inputs) -> ForwardTask:
        a, b = inputs.operands(work)
        ends = torch.tensor(
            tuple(accumulate(work.tokens_per_expert)), dtype=torch.int32, device=a.device
        )
        multiply = _grouped_mm()
        assert multiply is not None  # `refusal` has checked this
        return ForwardTask(lambda: multiply(a, b, offs=ends), (a, b))


class TorchPermute(BuiltInProvider[Permute]):
    """Permutation of tokens for MoE layers (`torch.permute`).

    Direction `permute` copies the tokens into the order of their experts, by `index_select`.
    Direction `unpermute` gathers the rows of each token, and returns their weighted sum.
    """

    kind = "permute"

    def refusal(self, work: Permute, device: DeviceSpec) -> str | None:
        return None

    def task(self, work: Permute, device: DeviceSpec, inputs: Inputs) -> LaunchTask:
        given = inputs.operands(work)
        x = given[0]
        order = given[-1]
        y = torch.empty_like(output_templates(work)[0], device=x.device)
        if work.direction == "permute":
            return LaunchTask(
                lambda: torch.index_select(x, 0, order // work.top_k, out=y), given, (y,)
            )
        gathered = x.new_empty(work.rows, work.hidden)
        shape = (work.tokens, work.top_k, work.hidden)
        weights = given[1][:, None, :]

        def unpermute() -> None:
            torch.index_select(x, 0, order, out=gathered)
            torch.bmm(weights, gathered.view(shape), out=y[:, None, :])

        return LaunchTask(unpermute, given, (y,))


def _grouped_mm() -> Callable[..., Any] | None:
    """Returns torch's function for grouped GEMMs; None if this version of torch has none."""
    return getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
