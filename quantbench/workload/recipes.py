"""Defines how a training step uses 8- and 4-bit formats: the formats of the products, and the casts
of their inputs.
"""

from dataclasses import dataclass

from quantbench.workload.ops import Cast, Gemm


@dataclass(frozen=True)
class Recipe:
    """Formats of the three products of a linear layer y = x·Wᵀ, whose x, W and dy are quantized.

    Tensor cores read 8-bit inputs along the reduction, which differs between the two uses of a
    tensor, so each is written twice. (On Blackwell the scales per tensor need no second copy; this
    is not modelled.) Casts are counted as kernels of their own that read bf16, those of weights
    once per micro-batch. Scores, norms, embedding and logits stay in 16 bits.

    forward, dgrad, wgrad: dtypes of the product and of the gradients of its data and weights.
    reads: times that a cast reads its tensor; 2 if the largest value is found first.
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
    """Returns the casts before the forward product of a linear layer, and those before its
    gradients.

    backward: whether gradients are computed, so that the forward casts also write the copies that
        those need.
    new_input: whether x is not the input of a layer before.
    experts: matrices of weights that share out the rows.
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
