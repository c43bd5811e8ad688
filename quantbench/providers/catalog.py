"""Which providers there are, by workload kind, without importing torch or triton.

A library's name alone stands for the variants that a sweep measures by default.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from quantbench.errors import InputError

if TYPE_CHECKING:
    from quantbench.providers.base import Provider

#: id → (workload kind, module, class)
_CATALOG: dict[str, tuple[str, str, str]] = {
    "torch.mm": ("gemm", "torch_gemm", "TorchMm"),
    "torch.addmm": ("gemm", "torch_gemm", "TorchAddmm"),
    "torch.eager": ("softmax", "torch_softmax", "TorchEagerSoftmax"),
    "torch.flash": ("attention", "torch_attention", "TorchFlash"),
    "torch.cudnn": ("attention", "torch_attention", "TorchCudnn"),
    "torch.efficient": ("attention", "torch_attention", "TorchEfficient"),
    "torch.math": ("attention", "torch_attention", "TorchMath"),
    "triton.data_parallel": ("gemm", "triton_gemm", "TritonDataParallel"),
    "triton.split_k": ("gemm", "triton_gemm", "TritonSplitK"),
    "triton.stream_k": ("gemm", "triton_gemm", "TritonStreamK"),
    "triton.persistent": ("gemm", "triton_gemm", "TritonPersistent"),
    "triton.fused": ("softmax", "triton_softmax", "TritonFusedSoftmax"),
    "triton.flash": ("attention", "triton_attention", "TritonFlash"),
}

#: what a library's name alone means
_DEFAULTS: dict[str, tuple[str, ...]] = {
    "torch": ("torch.mm", "torch.eager", "torch.flash", "torch.cudnn", "torch.efficient", "torch.math"),
    "triton": ("triton.data_parallel", "triton.fused", "triton.flash"),
}


def expand(names: Sequence[str]) -> tuple[str, ...]:
    """Provider ids for names as given on the command line; a library's name becomes its default variants.

    >>> expand(["triton"])
    ('triton.data_parallel', 'triton.fused', 'triton.flash')
    """
    ids: list[str] = []
    for name in names:
        if name not in _CATALOG and name not in _DEFAULTS:
            raise InputError("provider", repr(name), "one of " + ", ".join([*_DEFAULTS, *_CATALOG]))
        ids += [i for i in _DEFAULTS.get(name, (name,)) if i not in ids]
    return tuple(ids)


def kind_of(provider_id: str) -> str:
    """The workload kind that a provider runs."""
    return _CATALOG[provider_id][0]


def make(provider_id: str) -> Provider:
    """The provider itself; this is where torch or triton is first imported."""
    _, module, name = _CATALOG[provider_id]
    provider: Provider = getattr(import_module(f"quantbench.providers.{module}"), name)()
    return provider
