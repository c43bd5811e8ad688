"""Defines recipes for training with 8- and 4-bit formats, and the casts that they need.

A `Recipe` gives the dtypes of a linear layer's GEMMs. `casts_of` returns the casts, the kernels
that convert the layer's 16-bit tensors to these dtypes.
"""

from dataclasses import dataclass

from quantbench.workload.ops import Cast, Gemm


@dataclass(frozen=True)
class Recipe:
    """Dtypes of a linear layer's three GEMMs.

    The layer is y = x·Wᵀ. The tensors x, W and dy (the gradient of y) are quantized. Attention
    scores, norms, embedding and logits stay in 16 bits.

    Tensor cores read 8-bit inputs along the reduction dimension. Each tensor is an input of two
    GEMMs with different reduction dimensions, so its cast writes two copies. On Blackwell, formats
    with one scale per tensor need no second copy, but this is not modelled.

    forward: dtype of the GEMM that computes y.
    dgrad: dtype of the GEMM that computes the gradient of x.
    wgrad: dtype of the GEMM that computes the gradient of W.
    reads: number of times that a cast reads its tensor: 2 if the cast must find the tensor's
        largest value first, otherwise 1.
    """

    name: str
    forward: str
    dgrad: str
    wgrad: str
    reads: int = 1


# Sources: Transformer Engine documentation, "Performance considerations: handling transposes" and
# the pages of its recipes (Float8CurrentScaling, Float8BlockScaling, MXFP8BlockScaling), with
# `override_linear_precision` of DelayedScaling for gradients in bf16 (Megatron-LM's `fp8_wgrad`);
# DeepSeek-V3 (arXiv:2412.19437), section 3.3.
_ALL = (
    Recipe("tensorwise", "fp8", "fp8", "fp8", reads=2),
    Recipe("tensorwise_bf16_wgrad", "fp8", "fp8", "bf16", reads=2),
    Recipe("block", "fp8_block", "fp8_block", "fp8_block"),
    Recipe("mxfp8", "mxfp8", "mxfp8", "mxfp8"),
    Recipe("nvfp4", "nvfp4", "nvfp4", "nvfp4", reads=2),
)
RECIPES = {recipe.name: recipe for recipe in _ALL}


# Ops whose input, or whose output's gradient, is cast by a separate kernel. Such a tensor comes
# from attention, a residual addition or a permutation. Other casts cost no extra kernel per GEMM:
# Transformer Engine casts weights once per iteration, and casts the output of a norm or an
# activation in the kernel that computes the output (LayerNormLinear, LayerNormMLP).
_CASTS_INPUT = ("proj", "experts_up", "experts_up_gate")
_CASTS_GRADIENT = ("qkv", "q_up", "kv_up", "proj", "mlp_down", "shared_down", "experts_down")


def casts_of(
    name: str, gemm: Gemm, recipe: Recipe, *, backward: bool
) -> tuple[list[Cast], list[Cast]]:
    """Returns the casts before a linear layer's forward GEMM, and those before its gradient GEMMs.

    Only casts that are separate kernels are returned. The casts read bf16.

    name: name of the linear layer's op.
    gemm: the forward GEMM.
    backward: whether gradients are computed. The forward cast then also writes the copy of x for
        the gradient of W, if that copy has the forward dtype.
    """
    copies = 1 + (backward and recipe.wgrad == recipe.forward)

    def cast(cols: int) -> Cast:
        return Cast(gemm.m, cols, to=recipe.forward, reads=recipe.reads, copies=copies)

    forward = []
    if name in _CASTS_INPUT:
        forward.append(cast(gemm.k))
    gradients = []
    if backward and name in _CASTS_GRADIENT:
        gradients.append(cast(gemm.n))
    return forward, gradients
