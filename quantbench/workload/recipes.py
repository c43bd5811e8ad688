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
    one scale per tensor need no second copy, but this is not modelled. The model counts casts as
    separate kernels that read bf16, and casts weights once per micro-batch. Scores, norms,
    embedding and logits stay in 16 bits.

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


def casts_of(
    gemm: Gemm, recipe: Recipe, *, backward: bool, new_input: bool = True, experts: int = 1
) -> tuple[list[Cast], list[Cast]]:
    """Returns two lists: the casts before a linear layer's forward GEMM, and before its gradients.

    gemm: the forward GEMM.
    backward: whether gradients are computed. If so, the forward casts also write the second copies
        of x and W, for gradient GEMMs that use the forward dtype.
    new_input: whether x must be cast; False if another layer with the same input casts it.
    experts: number of weight matrices among which the GEMM's rows are divided.
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
