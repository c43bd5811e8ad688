"""Defines the recipes by which a training step uses 8- and 4-bit formats.

A `Recipe` gives the dtypes of a linear layer's GEMMs. `casts_of` returns the casts (conversions of
tensors to these dtypes) that the recipe needs.
"""

from dataclasses import dataclass

from quantbench.workload.ops import Cast, Gemm


@dataclass(frozen=True)
class Recipe:
    """Dtypes of a linear layer's three GEMMs. The layer is y = x·Wᵀ, with x, W and dy quantized.

    Tensor cores read 8-bit inputs along the reduction dimension. Each tensor is used in two GEMMs
    with different reduction dimensions, so its cast writes two copies. On Blackwell, formats with
    one scale per tensor need no second copy, but this is not modelled. Scores, norms, embedding and
    logits stay in 16 bits.

    forward: dtype of the GEMM that computes y.
    dgrad: dtype of the GEMM that computes the gradient of x.
    wgrad: dtype of the GEMM that computes the gradient of W.
    reads: number of times that a cast reads its tensor: 2 if it first finds the tensor's largest
        value, otherwise 1.
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


# Ops whose input comes from attention, a residual addition or a permutation, and ops for which the
# gradient of the output comes from one of these. The cast of such a tensor is a kernel of its own.
# Transformer Engine casts weights once per iteration, and casts the output of a norm or an
# activation within the kernel that computes it (LayerNormLinear, LayerNormMLP).
_CASTS_INPUT = ("proj", "experts_up", "experts_up_gate")
_CASTS_GRADIENT = ("qkv", "q_up", "kv_up", "proj", "mlp_down", "shared_down", "experts_down")


def casts_of(
    name: str, gemm: Gemm, recipe: Recipe, *, backward: bool
) -> tuple[list[Cast], list[Cast]]:
    """Returns two lists: the casts before a linear layer's forward GEMM, and before its gradients.

    Only casts that are separate kernels are returned. They read bf16.

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
