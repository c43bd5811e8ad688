"""Creates random inputs of workloads on a device (`Inputs`).

The same seed gives the same tensors on devices of the same kind. Every run records the distribution
of its inputs, because the power that a GPU draws, and with it the SM clock, depends on the data.
The module also defines the shapes, dtypes and strides of all inputs and outputs
(`input_templates`, `output_templates`).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from quantbench.errors import InputError
from quantbench.workload import Attention, Gemm, GroupedGemm, Permute, Softmax

if TYPE_CHECKING:
    from quantbench.device.spec import DeviceSpec
    from quantbench.workload import Workload

TORCH_DTYPES: dict[str, torch.dtype] = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
    "int32": torch.int32,
}

_CHUNK_ELEMENTS = 2**24  # 64 MiB of fp32
# On a CPU, large tensors are filled with copies from a pool of random numbers, one pool per dtype:
# size of the pool, and length of each copied piece.
_POOL_ELEMENTS = 2**16
_PIECE_ELEMENTS = 64
_INTEGER_LIMIT = 4  # largest absolute value of the distribution `integers`
# Largest number of each 8-bit dtype. For fp8, it is that of e4m3 (OCP FP8 1.0). For int8, −128 is
# not used, so that the range is symmetric.
_LARGEST = {"fp8": 448.0, "int8": 127.0}
# Value of a distribution that is scaled to the largest number of an 8-bit dtype. Larger absolute
# values are cut off: about one in 5·10⁸ normal numbers.
_RANGE = {"normal": 6.0, "uniform": 1.0}


def torch_device(device: DeviceSpec) -> torch.device:
    """Returns the torch device of a spec: the current CUDA device, or the CPU."""
    return torch.device(device.torch_kind)


def quantum(dtype: str, distribution: str) -> float:
    """Returns the scale of stored numbers, such that real value = quantum · stored number.

    For fp8 and int8, normal and uniform numbers are scaled to the range of the dtype, like
    quantised tensors. In all other cases the scale is 1.

    >>> quantum("int8", "uniform") == 1 / 127
    True
    """
    if dtype not in _LARGEST or distribution not in _RANGE:
        return 1.0
    return _RANGE[distribution] / _LARGEST[dtype]


class Inputs:
    """Generator of random tensors with one distribution, on one device, from one seed.

    distribution: one of the following.
    - `normal`: mean 0 and standard deviation 1.
    - `uniform`: between −1 and 1, as CUTLASS advises for measurements.
    - `integers`: whole numbers from −4 to 4, the default of CUTLASS' profiler.
    - `zeros`: all zero. This is unrealistic, and gives the shortest times on a GPU.


    Raises InputError for another distribution.
    """

    def __init__(self, device: DeviceSpec, distribution: str = "normal", seed: int = 0) -> None:
        if distribution not in ("normal", "uniform", "integers", "zeros"):
            known = "normal, uniform, integers or zeros"
            raise InputError("inputs", f"distribution = {distribution!r}", known)
        self.device = torch_device(device)
        self.distribution = distribution
        self.generator = torch.Generator(device=self.device).manual_seed(seed)
        self._pools: dict[torch.dtype, torch.Tensor] = {}

    def tensor(self, *shape: int, dtype: str) -> torch.Tensor:
        """Creates a contiguous random tensor of this shape."""
        out = torch.empty(shape, dtype=TORCH_DTYPES[dtype], device=self.device)
        self.fill(out)
        return out

    def operands(self, workload: Workload) -> tuple[torch.Tensor, ...]:
        """Creates all inputs of a workload, in the order and with the strides of `input_templates`.

        About half of the elements of a padding mask are True (masked), but never a whole row.
        Indices are a random permutation.
        """
        found = tuple(
            torch.empty_like(template, device=self.device) for template in input_templates(workload)
        )
        for tensor in found:
            self.fill(tensor)
        return found

    def gemm_operands(self, gemm: Gemm) -> tuple[torch.Tensor, torch.Tensor]:
        """Creates a and b of a GEMM, for user-defined providers."""
        a, b = self.operands(gemm)
        return a, b

    def fill(self, tensor: torch.Tensor) -> None:
        """Writes new numbers into a tensor, contiguous or transposed in its last two dimensions.

        A boolean tensor is filled as a padding mask, and a tensor of 64-bit integers as indices.
        """
        if tensor.dtype == torch.int64:
            torch.randperm(tensor.numel(), generator=self.generator, device=self.device, out=tensor)
            return
        with torch.no_grad():
            stored = tensor if tensor.is_contiguous() else tensor.mT
            if self.distribution == "zeros" and tensor.dtype != torch.bool:
                stored.zero_()
            elif self.device.type == "cpu" and tensor.numel() > _POOL_ELEMENTS:
                self._copy_pieces(stored.view(-1))
            else:
                self._draw(stored)
            if tensor.dtype == torch.bool:
                stored[..., 0] = False

    def _copy_pieces(self, flat: torch.Tensor) -> None:
        """Fills a vector with pieces from a pool of 2¹⁶ random numbers of its dtype.

        Each piece of 64 numbers is copied from a random position in the pool. Drawing all numbers
        would be slow, because a CPU draws only 50 to 100 million numbers a second.
        """
        if flat.dtype not in self._pools:
            self._pools[flat.dtype] = torch.empty(_POOL_ELEMENTS, dtype=flat.dtype)
            self._draw(self._pools[flat.dtype])
        pieces = self._pools[flat.dtype].unfold(0, _PIECE_ELEMENTS, 1)
        whole, rest = divmod(flat.numel(), _PIECE_ELEMENTS)
        starts = torch.randint(len(pieces), (whole + 1,), generator=self.generator)
        body = flat[: whole * _PIECE_ELEMENTS].view(whole, _PIECE_ELEMENTS)
        torch.index_select(pieces, 0, starts[:whole], out=body)
        flat[whole * _PIECE_ELEMENTS :] = pieces[starts[whole], :rest]

    def _draw(self, out: torch.Tensor) -> None:
        """Draws every element of a contiguous tensor anew."""
        if out.dtype == torch.bool:
            out.random_(generator=self.generator)
        elif out.dtype == TORCH_DTYPES["fp8"]:
            self._quantised(out, "fp8")
        elif out.dtype == torch.int8 and self.distribution != "integers":
            self._quantised(out, "int8")
        else:
            self._fill(out)

    def _fill(self, out: torch.Tensor) -> torch.Tensor:
        """Draws numbers of the distribution into `out`, without scaling."""
        if self.distribution == "normal":
            return out.normal_(generator=self.generator)
        if self.distribution == "uniform":
            return out.uniform_(-1, 1, generator=self.generator)
        return out.random_(-_INTEGER_LIMIT, _INTEGER_LIMIT + 1, generator=self.generator)

    def _quantised(self, out: torch.Tensor, dtype: str) -> None:
        """Draws numbers of an 8-bit dtype: draws fp32 numbers, and scales and converts them."""
        flat = out.view(-1)
        largest = _LARGEST[dtype]
        for start in range(0, flat.numel(), _CHUNK_ELEMENTS):
            part = flat[start : start + _CHUNK_ELEMENTS]
            drawn = self._fill(torch.empty(part.shape, dtype=torch.float32, device=self.device))
            drawn.div_(quantum(dtype, self.distribution)).clamp_(-largest, largest)
            if dtype == "int8":
                drawn.round_()
            part.copy_(drawn)


def input_templates(workload: Workload) -> tuple[torch.Tensor, ...]:
    """Returns the inputs of a workload (`Task.inputs`) as tensors without memory.

    These templates, on torch's meta device, have the shapes, dtypes and strides of the inputs:

    gemm: a (m, k) and b (k, n), with a leading batch dimension if batch > 1.
    grouped_gemm: a (rows, k) and b (experts, k, n); for layout tn a (k, rows) and b (rows, n).
    permute: x (tokens, hidden) and order (rows,); for direction `unpermute` x (rows, hidden),
        weights (tokens, top_k) and order (rows,).
    softmax: x (mask_batch, batch / mask_batch, rows, cols), and for a full mask a boolean mask
        (mask_batch, 1, rows, cols).
    attention: q (batch, heads, seq_q, head_dim), k and v (batch, kv_heads, seq_k, head_dim).

    A backward pass has the gradient of the result as its last input.
    Raises InputError for a workload that does not run on one GPU.
    """
    made = partial(_template, workload)
    found: tuple[torch.Tensor, ...]
    match workload:
        case Gemm(m=m, n=n, k=k, layout=layout):
            batch = (workload.batch,) if workload.batch > 1 else ()
            a = made(*batch, m, k, transposed=layout[0] == "t")
            return a, made(*batch, k, n, transposed=layout[1] == "t")
        case GroupedGemm(n=n, k=k, layout="tn"):
            return made(k, workload.rows, transposed=True), made(workload.rows, n)
        case GroupedGemm(n=n, k=k, layout=layout):
            weights = made(workload.num_experts, k, n, transposed=layout == "nt")
            return made(workload.rows, k), weights
        case Permute(tokens=tokens, hidden=hidden, top_k=top_k, direction=direction):
            order = torch.empty(workload.rows, dtype=torch.int64, device="meta")
            if direction == "permute":
                return made(tokens, hidden), order
            return made(workload.rows, hidden), made(tokens, top_k), order
        case Softmax(mask_batch=samples, rows=rows, cols=cols):
            x = made(samples, workload.batch // samples, rows, cols)
            found = (x,)
            if workload.mask == "full":
                found += (x.new_empty(samples, 1, rows, cols, dtype=torch.bool),)
        case Attention(batch=samples, head_dim=head_dim):
            x = made(samples, workload.heads, workload.seq_q, head_dim)
            like_keys = made(samples, workload.kv_heads, workload.seq_k, head_dim)
            found = (x, like_keys, like_keys)
        case _:
            expected = "one that runs on one GPU"
            raise InputError("inputs", f"a workload of kind {workload.kind}", expected)
    return (*found, x) if workload.direction == "backward" else found


def output_templates(workload: Workload) -> tuple[torch.Tensor, ...]:
    """Returns the outputs of a workload (`Task.outputs`) as tensors without memory.

    These templates, on torch's meta device, have the shapes and dtypes of the outputs. Only outputs
    of GEMMs and grouped GEMMs must also have the templates' strides; attention kernels, for
    instance, may store the heads in another order.
    """
    inputs = input_templates(workload)
    if isinstance(workload, Gemm | GroupedGemm):
        shape = (*inputs[0].shape[:-1], workload.n)
        if isinstance(workload, GroupedGemm) and workload.layout == "tn":
            shape = (workload.num_experts, workload.k, workload.n)
        return (inputs[0].new_empty(shape, dtype=TORCH_DTYPES[workload.output_dtype]),)
    if isinstance(workload, Permute):
        rows = workload.rows if workload.direction == "permute" else workload.tokens
        return (_template(workload, rows, workload.hidden),)
    if isinstance(workload, Attention) and workload.direction == "backward":
        return inputs[:3]
    return inputs[:1]


def _template(workload: Workload, *shape: int, transposed: bool = False) -> torch.Tensor:
    """Returns a tensor without memory, in the dtype of the workload.

    transposed: whether the last two dimensions are stored in the opposite order.
    """
    dtype = TORCH_DTYPES[workload.dtype]
    if not transposed:
        return torch.empty(shape, dtype=dtype, device="meta")
    *batch, rows, cols = shape
    return torch.empty(*batch, cols, rows, dtype=dtype, device="meta").mT
