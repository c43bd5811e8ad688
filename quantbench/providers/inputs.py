"""Random inputs, made on the device: the same seed gives the same tensors on the same kind of device.

Distributions (recorded with every run, because the power a GPU draws depends on the data):
  normal    mean 0, standard deviation 1
  uniform   between −1 and 1, as CUTLASS advises for measuring
  integers  whole numbers from −4 to 4, CUTLASS' profiler's default
  zeros     all zero: what nobody computes, and a GPU does fastest
fp8 and int8 hold them as quantised tensors do, spread over the format's range: `quantum` is the factor that turns a
stored number back into what it stands for.

Numbers of 16 and 32 bits are drawn in place. fp8 and some int8 are drawn in fp32 and converted, a chunk at a time, so
that making a tensor never needs a second one of its size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from quantbench.errors import InputError

if TYPE_CHECKING:
    from quantbench.device.spec import DeviceSpec
    from quantbench.workload import Attention, Gemm, Softmax

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
_INTEGER_LIMIT = 4
# Largest numbers of the narrow formats: OCP FP8 1.0 (e4m3), and int8 without −128, so that it stays symmetric.
_LARGEST = {"fp8": 448.0, "int8": 127.0}
# Where a distribution is cut off before it is spread over a narrow format: of 10¹¹ normal numbers one passes 6.7.
_RANGE = {"normal": 6.0, "uniform": 1.0}


def torch_device(device: DeviceSpec) -> torch.device:
    """torch's device for a spec: the current CUDA device, or the CPU."""
    return torch.device(device.kind)


def quantum(dtype: str, distribution: str) -> float:
    """What one unit of a stored number stands for: 1 but for fp8 and int8, where real = quantum · stored.

    >>> quantum("int8", "uniform") == 1 / 127
    True
    """
    if dtype not in _LARGEST or distribution not in _RANGE:
        return 1.0
    return _RANGE[distribution] / _LARGEST[dtype]


class Inputs:
    """Random tensors of one distribution on one device, one after another from one seed."""

    def __init__(self, device: DeviceSpec, distribution: str = "normal", seed: int = 0) -> None:
        if distribution not in ("normal", "uniform", "integers", "zeros"):
            raise InputError("inputs", f"distribution = {distribution!r}", "normal, uniform, integers or zeros")
        self.device = torch_device(device)
        self.distribution = distribution
        self._generator = torch.Generator(device=self.device).manual_seed(seed)

    def tensor(self, *shape: int, dtype: str) -> torch.Tensor:
        """A contiguous tensor of `shape`, filled."""
        out = torch.empty(shape, dtype=TORCH_DTYPES[dtype], device=self.device)
        if self.distribution == "zeros":
            return out.zero_()
        if dtype == "fp8" or (dtype == "int8" and self.distribution != "integers"):
            return self._quantised(out, dtype)
        return self._fill(out)

    def gemm_operands(self, gemm: Gemm) -> tuple[torch.Tensor, torch.Tensor]:
        """a[m, k] and b[k, n], with a leading batch dimension when batch > 1, stored as the layout's letters say."""
        batch = (gemm.batch,) if gemm.batch > 1 else ()
        a = self._stored(*batch, gemm.m, gemm.k, dtype=gemm.dtype, transposed=gemm.layout[0] == "t")
        b = self._stored(*batch, gemm.k, gemm.n, dtype=gemm.dtype, transposed=gemm.layout[1] == "t")
        return a, b

    def scores(self, softmax: Softmax) -> torch.Tensor:
        """x[mask_batch, batch / mask_batch, rows, cols]: samples, heads, queries, keys."""
        heads = softmax.batch // softmax.mask_batch
        return self.tensor(softmax.mask_batch, heads, softmax.rows, softmax.cols, dtype=softmax.dtype)

    def padding_mask(self, softmax: Softmax) -> torch.Tensor:
        """A boolean mask[mask_batch, 1, rows, cols]; True drops. Half of it is True, never a whole row."""
        shape = (softmax.mask_batch, 1, softmax.rows, softmax.cols)
        mask = torch.empty(shape, dtype=torch.bool, device=self.device).random_(generator=self._generator)
        mask[..., 0] = False
        return mask

    def attention_operands(self, attention: Attention) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q[batch, heads, seq_q, head_dim], k and v[batch, kv_heads, seq_k, head_dim]."""
        q_shape = (attention.batch, attention.heads, attention.seq_q, attention.head_dim)
        kv_shape = (attention.batch, attention.kv_heads, attention.seq_k, attention.head_dim)
        q = self.tensor(*q_shape, dtype=attention.dtype)
        k = self.tensor(*kv_shape, dtype=attention.dtype)
        return q, k, self.tensor(*kv_shape, dtype=attention.dtype)

    def _stored(self, *shape: int, dtype: str, transposed: bool) -> torch.Tensor:
        if not transposed:
            return self.tensor(*shape, dtype=dtype)
        *batch, rows, cols = shape
        return self.tensor(*batch, cols, rows, dtype=dtype).transpose(-1, -2)

    def _fill(self, out: torch.Tensor) -> torch.Tensor:
        if self.distribution == "normal":
            return out.normal_(generator=self._generator)
        if self.distribution == "uniform":
            return out.uniform_(-1, 1, generator=self._generator)
        return out.random_(-_INTEGER_LIMIT, _INTEGER_LIMIT + 1, generator=self._generator)

    def _quantised(self, out: torch.Tensor, dtype: str) -> torch.Tensor:
        flat = out.view(-1)
        largest = _LARGEST[dtype]
        for start in range(0, flat.numel(), _CHUNK_ELEMENTS):
            part = flat[start : start + _CHUNK_ELEMENTS]
            drawn = self._fill(torch.empty(part.shape, dtype=torch.float32, device=self.device))
            drawn.div_(quantum(dtype, self.distribution)).clamp_(-largest, largest)
            part.copy_(drawn.round_() if dtype == "int8" else drawn)
        return out
