"""Defines recipes, which state how a training step uses 8- and 4-bit formats.

A recipe states the dtypes of the GEMMs of linear layers. The casts to these dtypes follow from it.
"""

from dataclasses import dataclass

from quantbench.workload.ops import Cast, Gemm


@dataclass(frozen=True)
class Recipe:
    """Dtypes of the three GEMMs of a linear layer y = x·Wᵀ, whose x, W and dy are quantized.

    Tensor cores read 8-bit inputs along the reduction. Each tensor is used in two GEMMs that reduce
    over different dimensions, so its cast writes two copies. On Blackwell, formats with one scale
    per tensor need no second copy, but this is not modelled. Scores, norms, embedding and logits
    stay in 16 bits.

    forward, dgrad, wgrad: dtypes of the three GEMMs, which compute y, the gradient of x and the
        gradient of W.
    reads: how many times a cast reads its tensor: twice if the cast first finds the largest value
        of the tensor, else once.
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
    """Returns the casts before a linear layer's forward GEMM, and the casts before its gradients.

    These are the casts that are kernels of their own, which read bf16.

    name: name of the linear layer's op.
    backward: whether gradients are computed. The forward cast then also writes the copy of x for
        the gradient of W, if that has the forward dtype.
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
