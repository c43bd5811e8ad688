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
    per tensor need no second copy, but this is not modelled. Casts count as separate kernels that
    read bf16, and weights are cast once per micro-batch. Scores, norms, embedding and logits stay
    in 16 bits.

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


def casts_of(
    gemm: Gemm, recipe: Recipe, *, backward: bool, new_input: bool = True, experts: int = 1
) -> tuple[list[Cast], list[Cast]]:
    """Returns the casts before a linear layer's forward GEMM, and the casts before its gradients.

    backward: whether gradients are computed. The forward casts then also write the copies of x and
        W for the gradient GEMMs that use the forward dtype.
    new_input: whether x must be cast. It need not be if another layer with the same input casts it.
    experts: number of weight matrices that share the rows.
    """

    def cast(rows: int, cols: int, second: str) -> Cast:
        copies = 1 + (backward and second == recipe.forward)
        return Cast(rows, cols, to=recipe.forward, reads=recipe.reads, copies=copies)

    forward = [cast(experts * gemm.n, gemm.k, recipe.dgrad)]
    if new_input:
        forward.insert(0, cast(gemm.m, gemm.k, recipe.wgrad))
    gradients = []
    if backward:
        gradients.append(cast(gemm.m, gemm.n, recipe.wgrad))
    return forward, gradients
