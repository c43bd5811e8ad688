"""Checks the outputs of a workload against a reference, at a fraction of the workload's cost.

`check` is the entry point; `audit` calls it. The error of an output is ‖out − ref‖ / ‖ref‖, which
must be at most the tolerance. The error of each row must be at most 3.2 times the tolerance. If the
terms of a sum cancel, ‖ref‖ is the norm before they cancel. The references share no code with
quantbench's kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import isfinite, sqrt

import torch

from quantbench.errors import InputError, MeasurementError
from quantbench.providers.base import Tolerance
from quantbench.workload import Attention, Gemm, GroupedGemm, Permute, Softmax, Workload

_VECTORS = 8  # random vectors on each side of a GEMM in `_freivalds`
#: Largest allowed error of a row, as a multiple of the tolerance. `_freivalds` only estimates the
#: error of a row. P(χ²(8) > 8 · 3.2²) = 2e-14, so fewer than one in 10¹³ correct rows fails.
_ROW_FACTOR = 3.2
#: Of every this many consecutive rows of attention, one random row is checked.
TILE = 64

# Number of elements that are converted and checked at a time. On a CPU, they fit into a core's
# cache (1 MiB in float64). On CUDA, they keep the GPU busy (128 MiB in float64).
_CHUNK_ELEMENTS = {"cpu": 2**17, "cuda": 2**24}
# Up to this number of query-key pairs, all rows of attention are checked.
_WHOLE_PAIRS = 2**21

# Tolerances by dtype, each with its reason. There is one table for GEMMs, the weighted sums of
# unpermute, softmax, attention, and the backward pass of attention.
_GEMM = {
    "fp16": (
        1e-3,
        "fp16 results: 11 bits, 2e-4 from rounding, and split-k parts that may be added in fp16",
    ),
    "bf16": (
        5e-3,
        "bf16 results: 8 bits, 1.7e-3 from rounding, and split-k parts that may be added in bf16",
    ),
    "tf32": (1e-3, "operands cut to 11 bits"),
    "fp8": (
        1e-2,
        "bf16 results of exact fp8 operands; tensor cores may keep 14 bits between k-steps",
    ),
    # The check computes int8 GEMMs in float64, with almost no rounding. If one of 16384² elements
    # is wrong by 1, the error is 1e-8.
    "int8": (1e-13, "integers are exact"),
}
_SUMS = {
    "fp16": (2e-3, "weights times rows, summed and rounded to 11 bits one after the other"),
    "bf16": (1e-2, "weights times rows, summed and rounded to 8 bits one after the other"),
    "fp32": (1e-6, "fp32 sums of a few products"),
}
_SOFTMAX = {
    "fp16": (1e-3, "one rounding to 11 bits, fp32 inside: 2e-4"),
    "bf16": (5e-3, "one rounding to 8 bits, fp32 inside: 1.7e-3"),
    "fp32": (1e-5, "fp32 throughout, with a fast exponential of 2 units in the last place"),
}
_ATTENTION = {
    "fp16": (2e-3, "probabilities and result rounded to 11 bits: 4e-4"),
    "bf16": (1e-2, "probabilities and result rounded to 8 bits: 2.5e-3"),
    "fp32": (1e-4, "fp32 products, or three tf32 products for one; a single one would be 3e-4"),
}
_ATTENTION_BACKWARD = {
    "fp16": (
        4e-3,
        "probabilities, their gradients and results rounded to 11 bits, twice in a row: 8e-4",
    ),
    "bf16": (
        2e-2,
        "probabilities, their gradients and results rounded to 8 bits, twice in a row: 5e-3",
    ),
    "fp32": (2e-4, "fp32 products and sums, and differences of nearly equal numbers"),
}


def tolerance(workload: Workload) -> Tolerance:
    """Returns the bound on the relative error of a whole output, which is ‖out − ref‖ / ‖ref‖.

    The bound is several times the error of correct results.

    Raises InputError for a workload that does not run on one GPU.

    >>> tolerance(Gemm(4096, 4096, 16384)).relative_norm
    0.005
    """
    if isinstance(workload, GroupedGemm):
        return tolerance(workload.gemm(max(workload.tokens_per_expert)))
    if isinstance(workload, Permute):
        if workload.direction == "permute":
            return Tolerance(0.0, "copies are exact")
        return Tolerance(*_SUMS[workload.dtype])
    if isinstance(workload, Gemm):
        if workload.dtype == "fp32":
            # The rounding error of a sum in any order grows as √k. The measured error is 0.35 ·
            # 2⁻²⁴ · √k. A GEMM in tf32 instead of fp32 would have an error of 3e-4.
            bound = 2**-24 * (4 + sqrt(workload.k))
            return Tolerance(bound, f"fp32 sums of {workload.k} products: 2⁻²⁴·(4 + √k)")
        return Tolerance(*_GEMM[workload.dtype])
    if isinstance(workload, Softmax):
        return Tolerance(*_SOFTMAX[workload.dtype])
    if isinstance(workload, Attention):
        bounds = _ATTENTION if workload.direction == "forward" else _ATTENTION_BACKWARD
        return Tolerance(*bounds[workload.dtype])
    raise InputError("tolerance", f"a workload of kind {workload.kind}", "one that runs on one GPU")


@dataclass(frozen=True)
class Rows:
    """Squared errors of some rows of one output, and squared norms of the reference.

    what: name of the rows for messages, such as "rows of o".
    error: squared norm of each row's error.
    norm: squared norm of each row of the reference. If the terms of a row cancel, this is the
        squared norm before they cancel.
    """

    what: str
    error: torch.Tensor  # (rows,)
    norm: torch.Tensor  # (rows,)


def _joined(parts: Sequence[Rows]) -> Rows:
    """Joins several groups of rows of one output into one group."""
    return Rows(
        parts[0].what,
        torch.cat([rows.error for rows in parts]),
        torch.cat([rows.norm for rows in parts]),
    )


def _joined_outputs(parts: Sequence[Sequence[Rows]]) -> list[Rows]:
    """Joins the groups of rows of each output.

    parts: checked parts of a workload, such as its experts; for each part, the rows of each output.
    """
    return [_joined(same) for same in zip(*parts, strict=True)]


def check(
    who: str,
    workload: Workload,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    generator: torch.Generator,
    *,
    required_rows: Sequence[tuple[int, ...]] = (),
) -> float:
    """Checks the outputs of a workload that has run, and returns the largest relative error.

    (`audit.check` also runs the workload.)

    who: operation for error messages.
    inputs, outputs: tensors of `Task.inputs` and `Task.outputs`, with correct shapes.
    generator: source of the random vectors and rows of the check. The provider must not know its
        seed.
    required_rows: (sample, head, row) of attention queries that must be checked; default only
        random queries.

    Raises MeasurementError, which states the error and the bound, if an error is too large.
    """
    inputs = [tensor.detach() for tensor in inputs]
    outputs = [tensor.detach() for tensor in outputs]
    bound = tolerance(workload)
    if isinstance(workload, Gemm):
        found = _product(workload, inputs, outputs[0], generator)
    elif isinstance(workload, GroupedGemm):
        found = _grouped(workload, inputs, outputs[0], generator)
    elif isinstance(workload, Permute):
        found = [_permuted(workload, inputs, outputs[0])]
    elif isinstance(workload, Softmax):
        found = [_softmax(workload, inputs, outputs[0], bound.relative_norm)]
    else:
        assert isinstance(workload, Attention)  # `tolerance` refuses all other workloads
        found = _attention(workload, inputs, outputs, generator, required_rows)
    return max(_judge(who, rows, bound, outputs) for rows in found)


def _judge(who: str, rows: Rows, bound: Tolerance, outputs: Sequence[torch.Tensor]) -> float:
    """Returns the relative error over all rows.

    outputs: outputs of the task, in which unwritten elements are counted for the error message.

    Raises MeasurementError if the error over all rows exceeds the bound, or if the error of one row
    exceeds 3.2 times the bound.
    """
    whole = float(_relative(rows.error.sum(), rows.norm.sum()))
    worst = float(_relative(rows.error, rows.norm).max())
    limit = bound.relative_norm
    if whole <= limit and worst <= _ROW_FACTOR * limit:
        return whole
    if not isfinite(whole) or not isfinite(worst):
        unwritten = sum(_not_finite(output) for output in outputs)
        if unwritten:
            total = sum(output.numel() for output in outputs)
            found = f"{unwritten} of {total} elements not written or not a number"
            raise MeasurementError(who, found, "every element")
    found = f"relative error {whole:.3g}"
    if whole <= limit:
        found = f"relative error {worst:.3g} in one of the {rows.what}"
        limit *= _ROW_FACTOR
    raise MeasurementError(who, found, f"at most {limit:.3g} ({bound.source})")


def _relative(error: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    """Returns √(error / norm), which is 0 if the error is 0, and NaN if an argument is NaN."""
    return torch.where(error == 0, norm.isnan() * norm, error / norm).sqrt()


def _not_finite(output: torch.Tensor) -> int:
    """Returns the number of elements of an output that are infinite or NaN."""
    found = 0
    if output.dtype.is_floating_point:
        for _, part in row_chunks(output.reshape(1, -1, output.shape[-1])):
            found += int((~part.isfinite()).sum())
    return found


def fast_format() -> torch.dtype:
    """Returns the dtype for fast checks: fp32, which GEMMs must compute in full precision.

    A provider may have lowered the precision of fp32 GEMMs for the whole process. Returns float64
    in this case.
    """
    return torch.float32 if torch.get_float32_matmul_precision() == "highest" else torch.float64


def _precision(workload: Workload) -> torch.dtype:
    """Returns the dtype in which a check computes.

    This is `fast_format()` if the tolerance is 1e-3 or more, else float64.
    """
    return fast_format() if tolerance(workload).relative_norm >= 1e-3 else torch.float64


def row_chunks(matrices: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yields chunks of consecutive rows of matrices, as (slice of the rows, chunk).

    matrices: matrices of equal shape (group, rows, cols). A chunk has the rows of all matrices.
    """
    group, rows, cols = matrices.shape
    step = max(1, _CHUNK_ELEMENTS[matrices.device.type] // (group * cols))
    for start in range(0, rows, step):
        part = slice(start, min(start + step, rows))
        yield part, matrices[:, part]


# --- GEMMs and permutations -----------------------------------------------------------------------


@dataclass(frozen=True)
class Projections:
    """Results of `project`.

    left: left·M (group, left vectors, cols).
    right: M·right (group, rows, right vectors).
    square: sum of ‖M‖² over all matrices; 0 if it was not requested.
    """

    left: torch.Tensor
    right: torch.Tensor
    square: torch.Tensor


def project(
    matrices: torch.Tensor,
    compute: torch.dtype,
    left: torch.Tensor | None = None,
    right: torch.Tensor | None = None,
    *,
    square: bool = False,
) -> Projections:
    """Multiplies matrices by a few vectors from the left and from the right.

    The matrices are read in chunks, in the order in which they are stored. Each chunk is read and
    converted only once.

    matrices: the matrices M (group, rows, cols).
    compute: dtype of left, right and the sums.
    left: vectors (group, vectors, rows); None to skip this side.
    right: vectors (group, cols, vectors); None to skip this side.
    square: whether to compute ‖M‖² as well.
    """
    group, rows, cols = matrices.shape
    if left is None:
        left = matrices.new_empty(group, 0, rows, dtype=compute)
    if right is None:
        right = matrices.new_empty(group, cols, 0, dtype=compute)
    if matrices.stride(-1) > matrices.stride(-2):
        turned = project(matrices.mT, compute, right.mT, left.mT, square=square)
        return Projections(turned.right.mT, turned.left.mT, turned.square)
    lefts = left.new_zeros(group, left.shape[1], cols)
    # The right vectors become rows, because GEMMs with few rows are faster than with few columns.
    right_rows = right.mT.contiguous()
    rights = []
    squares = [left.new_zeros(())]
    buffer = left.new_empty(0)
    for part, chunk in row_chunks(matrices):
        # All chunks share one buffer. On a CPU, allocating memory takes longer than converting.
        if buffer.numel() < chunk.numel():
            buffer = buffer.new_empty(chunk.numel())
        converted = buffer[: chunk.numel()].view(chunk.shape).copy_(chunk)
        if square:
            squares.append(torch.dot(converted.view(-1), converted.view(-1)))
        if left.shape[1]:
            lefts.baddbmm_(left[:, :, part], converted)
        if right.shape[2]:
            rights.append(right_rows @ converted.mT)
    if rights:
        right = torch.cat(rights, dim=2).mT
    return Projections(lefts, right, torch.stack(squares).double().sum())


def _product(
    work: Gemm, inputs: Sequence[torch.Tensor], c: torch.Tensor, generator: torch.Generator
) -> list[Rows]:
    """Checks the rows and columns of a GEMM by `_freivalds`."""
    matrices = [*inputs, c]
    if c.dim() == 2:
        matrices = [matrix[None] for matrix in matrices]
    # Number of matrices of the batch that are checked together. A chunk then contains at least 64
    # rows of each matrix.
    longest = max(work.m, work.n, work.k)
    together = max(1, _CHUNK_ELEMENTS[c.device.type] // (64 * longest))
    chunks = zip(*(matrix.split(together) for matrix in matrices), strict=True)
    compute = _precision(work)
    return _joined_outputs([_freivalds(a, b, c, generator, compute) for a, b, c in chunks])


def _grouped(
    work: GroupedGemm, inputs: Sequence[torch.Tensor], c: torch.Tensor, generator: torch.Generator
) -> list[Rows]:
    """Checks the rows and columns of each expert's GEMM by `_freivalds`.

    For layout tn, the output of an expert without rows must be 0.
    """
    a, b = inputs
    compute = _precision(work)
    parts = []
    idle = []
    start = 0
    for expert, rows in enumerate(work.tokens_per_expert):
        at = slice(start, start + rows)
        start += rows
        if not rows:
            idle.append(expert)
            continue
        if work.layout == "tn":
            one = (a[None, :, at], b[None, at], c[None, expert])
        else:
            one = (a[None, at], b[None, expert], c[None, at])
        parts.append(_freivalds(*one, generator, compute))
    found = _joined_outputs(parts)
    if idle and work.layout == "tn":
        zeros = _square(c[idle].to(compute))
        found.append(Rows("rows of experts without tokens", zeros, torch.zeros_like(zeros)))
    return found


def _permuted(work: Permute, inputs: Sequence[torch.Tensor], y: torch.Tensor) -> Rows:
    """Checks every row of a permutation, which is recomputed in chunks. Copies must be exact."""
    x = inputs[0]
    order = inputs[-1]
    compute = _precision(work)
    parts = []
    for part, chunk in row_chunks(y[None]):
        if work.direction == "unpermute":
            at = order.view(-1, work.top_k)[part]
            terms = x[at].to(compute) * inputs[1][part, :, None].to(compute)
        else:
            at = order[part, None] // work.top_k
            terms = x[at].to(compute)
        error = _square(chunk[0].to(compute) - terms.sum(1))
        parts.append(Rows("rows", error, _square(terms).view(len(at), -1).sum(1)))
    return _joined(parts)


def _freivalds(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    generator: torch.Generator,
    compute: torch.dtype,
) -> list[Rows]:
    """Estimates the error of each row and each column of c, which should be a·b.

    This is Freivalds' check. With 8 random normal vectors x and 8 vectors y, c·x is compared with
    a·(b·x), and yᵀ·c with (yᵀ·a)·b. The cost is O(mn + nk + mk) instead of O(mnk).

    If e is the error of a row, its residual with each random vector is normal with standard
    deviation ‖e‖. The mean square over 8 vectors is therefore ‖e‖² · χ²(8) / 8, which gives these
    probabilities:
    - a correct row fails: 2e-14;
    - a row or column passes although its error is 32 times the tolerance: 1e-7;
    - a row or column passes although its error is 13 times the tolerance: 1e-4.

    Errors in many rows add up, so an error of 1.5 times the tolerance over the whole output is
    found. A tile of 128×128 that is missing in an output of 16384×16384 is found too.

    Errors are relative to the larger of two norms: the expected norm of a·b for random matrices
    with the norms of a and b, and the norm of c as estimated with the same vectors.

    a, b, c: matrices (group, m, k), (group, k, n) and (group, m, n).
    compute: dtype of the computation.
    """
    group, m, n = c.shape
    k = a.shape[-1]

    def vectors(*shape: int) -> torch.Tensor:
        """Draws random normal vectors, the same for all matrices of the group."""
        drawn = torch.randn(*shape, generator=generator, device=a.device, dtype=compute)
        return drawn.expand(group, -1, -1)

    x = vectors(n, _VECTORS)
    y = vectors(_VECTORS, m)
    of_a = project(a, compute, left=y, square=True)
    of_b = project(b, compute, left=of_a.left, right=x, square=True)
    of_c = project(c, compute, left=y, right=x)
    expected_x = project(a, compute, right=of_b.right).right
    expected_y = of_b.left
    # Expected mean square of an element of a·b.
    element = of_a.square * of_b.square / (group**2 * m * k * n)

    def rows(
        what: str, found: torch.Tensor, expected: torch.Tensor, dim: int, norm: torch.Tensor
    ) -> Rows:
        """Estimates squared errors from the products of c with random vectors.

        found, expected: products with c, and the same products with a·b.
        dim: dimension of the random vectors, over which the mean square is taken.
        norm: expected squared norm of a row or column of a·b.
        """
        error = (found - expected).double().square_().mean(dim).flatten()
        own = found.double().square_().mean(dim).flatten()
        return Rows(what, error, torch.maximum(own, norm))

    return [
        rows("rows", of_c.right, expected_x, -1, n * element),
        rows("columns", of_c.left, expected_y, -2, m * element),
    ]


# --- softmax --------------------------------------------------------------------------------------


def causal_mask(rows: int, cols: int, device: torch.device, first_row: int = 0) -> torch.Tensor:
    """Returns a boolean mask (rows, cols) that is True above the diagonal, where scores are masked.

    first_row: index of the mask's first row in the whole matrix; default 0.
    """
    return torch.ones(rows, cols, dtype=torch.bool, device=device).triu(diagonal=1 + first_row)


def softmax(x: torch.Tensor, scale: float, dropped: torch.Tensor | None) -> torch.Tensor:
    """Computes softmax(scale · x) over the last dimension, in the dtype of x.

    dropped: boolean mask, True for masked elements, whose result is 0; None for no mask.
    """
    scores = x * scale
    if dropped is not None:
        scores = scores.masked_fill(dropped, -torch.inf)
    scores = (scores - scores.amax(-1, keepdim=True)).exp()
    return scores / scores.sum(-1, keepdim=True)


def softmax_backward(y: torch.Tensor, gradient: torch.Tensor, scale: float) -> torch.Tensor:
    """Returns the gradient of x, given y = softmax(scale · x) and the gradient of y."""
    return scale * y * (gradient - (gradient * y).sum(-1, keepdim=True))


def _softmax(
    work: Softmax, inputs: Sequence[torch.Tensor], output: torch.Tensor, bound: float
) -> Rows:
    """Checks every row of a softmax, or of its gradient, which are recomputed in chunks.

    bound: the tolerance, as a relative error.
    """
    x = inputs[0]
    compute = _precision(work)
    samples, heads, rows, cols = x.shape
    # A result below the smallest number of its dtype correctly becomes 0. The floor is added to the
    # norms, so that such a difference stays within the bound.
    smallest = torch.finfo(x.dtype).smallest_normal * torch.finfo(x.dtype).eps
    floor = cols * (smallest / bound) ** 2
    chunk = _CHUNK_ELEMENTS[x.device.type]
    rows_at_once = max(1, min(rows, chunk // cols))
    heads_at_once = max(1, chunk // (rows_at_once * cols))
    starts = product(range(samples), range(0, heads, heads_at_once), range(0, rows, rows_at_once))
    parts = []
    for sample, head, row in starts:
        at = (sample, slice(head, head + heads_at_once), slice(row, row + rows_at_once))
        scores = x[at].to(compute)
        dropped = None
        if work.mask == "causal":
            dropped = causal_mask(scores.shape[1], cols, x.device, row)
        elif work.mask == "full":
            dropped = inputs[1][sample, :, at[2]]
        expected = softmax(scores, work.scale, dropped)
        size = expected
        if work.direction == "backward":
            gradient = inputs[-1][at].to(compute)
            # The gradient is a difference of two terms. Correct results lose digits where the terms
            # cancel, so the norm is computed from their absolute values.
            mean = (gradient * expected).abs_().sum(-1, keepdim=True)
            size = work.scale * expected * (gradient.abs() + mean)
            expected = softmax_backward(expected, gradient, work.scale)
        error = _square(output[at].to(compute).sub_(expected))
        parts.append(Rows("rows", error, _square(size) + floor))
    return _joined(parts)


# --- attention ------------------------------------------------------------------------------------


def _attention(
    work: Attention,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    generator: torch.Generator,
    required_rows: Sequence[tuple[int, ...]],
) -> list[Rows]:
    """Recomputes random rows of attention and checks them, one of every TILE rows in each head.

    In the forward pass, these are rows of o. In the backward pass, they are rows of the gradients
    of q, k and v. A small workload is checked in all rows. A wrong block of TILE aligned rows is
    always found. Errors in a fraction s of the rows are missed with probability
    (1 − s)^(number of checked rows).

    required_rows: (sample, head, row) of queries that must be checked.
    """
    tile = 1 if work.batch * work.heads * work.seq_q * work.seq_k <= _WHOLE_PAIRS else TILE
    group = work.heads // work.kv_heads
    parts = []
    for sample, head in product(range(work.batch), range(work.kv_heads)):
        heads = slice(head * group, (head + 1) * group)
        queries = _one_of_each(work.seq_q, tile, generator)
        for in_sample, in_head, row in required_rows:
            if in_sample == sample and heads.start <= in_head < heads.stop:
                queries[row // tile] = row
        keys = _one_of_each(work.seq_k, tile, generator)
        q = inputs[0][sample, heads]
        k = inputs[1][sample, head]
        v = inputs[2][sample, head]
        of_q = outputs[0][sample, heads]
        if work.direction == "forward":
            parts.append([_attention_rows(work, q, k, v, of_q, queries)])
        else:
            results = [of_q, outputs[1][sample, head], outputs[2][sample, head]]
            gradient = inputs[3][sample, heads]
            parts.append(_attention_gradients(work, q, k, v, gradient, results, queries, keys))
    return _joined_outputs(parts)


def _one_of_each(size: int, tile: int, generator: torch.Generator) -> torch.Tensor:
    """Draws one random index from each `tile` consecutive indices in 0 … size − 1."""
    starts = torch.arange(0, size, tile, device=generator.device)
    within = torch.randint(tile, starts.shape, generator=generator, device=generator.device)
    return starts + torch.minimum(within, size - 1 - starts)


def _attention_rows(
    work: Attention,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    o: torch.Tensor,
    queries: torch.Tensor,
) -> Rows:
    """Checks some rows of o, for one key head of one sample.

    q, o: query heads that share the key head, and their results (heads, seq_q, head_dim).
    k, v: keys and values of the key head (seq_k, head_dim).
    queries: indices of the rows to check, in all query heads (rows,).
    """
    compute = _precision(work)
    k = k.to(compute)
    v = v.to(compute)
    v_norm = v.square().sum(-1)
    parts = []
    step = max(1, _CHUNK_ELEMENTS[q.device.type] // (len(q) * work.seq_k))
    for picked in queries.split(step):
        p = _attend(work, q[:, picked].to(compute), k, picked)
        expected = p @ v
        error = _square(o[:, picked].to(compute) - expected)
        norm = torch.maximum(p.square() @ v_norm, expected.square().sum(-1))
        parts.append(Rows("rows of o", error, norm.double().flatten()))
    return _joined(parts)


def _attention_gradients(
    work: Attention,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gradient: torch.Tensor,
    results: Sequence[torch.Tensor],
    queries: torch.Tensor,
    keys: torch.Tensor,
) -> list[Rows]:
    """Checks some rows of dq, dk and dv, the gradients of q, k and v, for one key head of a sample.

    The gradient of the scores is ds = p·(dp − δ), where p are the probabilities, dp is their
    gradient, and δ is the mean of dp under p. Errors are relative to the norms of the terms before
    they cancel.

    q, gradient: query heads that share the key head, and the gradient of o (heads, seq_q,
        head_dim).
    k, v: keys and values of the key head (seq_k, head_dim).
    results: dq, dk and dv as the provider computed them.
    queries: indices of the rows of dq to check (rows,).
    keys: indices of the rows of dk and dv to check (rows,).
    """
    compute = _precision(work)
    scale = work.head_dim**-0.5
    k = k.to(compute)
    v = v.to(compute)
    k_norm = k.square().sum(-1)
    v_square = v.square()
    dk = torch.zeros(len(keys), work.head_dim, dtype=torch.float64, device=q.device)
    dv = torch.zeros_like(dk)
    dk_norm = torch.zeros(len(keys), dtype=torch.float64, device=q.device)
    dv_norm = torch.zeros_like(dk_norm)
    parts = []
    step = max(1, _CHUNK_ELEMENTS[q.device.type] // (len(q) * work.seq_k))
    for part in torch.arange(work.seq_q, device=q.device).split(step):
        q_part = q[:, part].to(compute)
        do = gradient[:, part].to(compute)
        p = _attend(work, q_part, k, part)
        dp = do @ v.T
        delta = (p * dp).sum(-1, keepdim=True)
        ds = p * (dp - delta) * scale
        # If the terms of dp cancel, as in the first causal rows, dp is small but its rounding error
        # is not. The norm of dp is therefore taken to be at least that of its terms.
        dp_square = torch.maximum(dp.square_(), do.square() @ v_square.T)
        size = p.square() * (dp_square + delta.square_()) * scale**2
        picked = queries[(queries >= part[0]) & (queries <= part[-1])]
        local = picked - part[0]
        error = _square(results[0][:, picked].to(compute) - ds[:, local] @ k)
        norm = (size[:, local] @ k_norm).double().flatten()
        parts.append(Rows("rows of the gradient of q", error, norm))
        columns = p[..., keys]
        dv += torch.einsum("hij,hid->jd", columns, do).double()
        dk += torch.einsum("hij,hid->jd", ds[..., keys], q_part).double()
        dv_norm += torch.einsum("hij,hi->j", columns.square(), do.square().sum(-1)).double()
        dk_norm += torch.einsum("hij,hi->j", size[..., keys], q_part.square().sum(-1)).double()
    return [
        _joined(parts),
        Rows("rows of the gradient of k", _square(results[1][keys].double() - dk), dk_norm),
        Rows("rows of the gradient of v", _square(results[2][keys].double() - dv), dv_norm),
    ]


def _attend(work: Attention, q: torch.Tensor, k: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Returns the attention probabilities of query rows over all keys (heads, rows, seq_k).

    q: query rows (heads, rows, head_dim).
    k: keys of one head (seq_k, head_dim).
    rows: positions of the query rows in the sequence (rows,).
    """
    dropped = None
    if work.causal:
        dropped = torch.arange(work.seq_k, device=q.device) > rows[:, None]
    return softmax(q @ k.T, work.head_dim**-0.5, dropped)


def _square(difference: torch.Tensor) -> torch.Tensor:
    """Returns the squared norm of each row, as a vector (rows,)."""
    norm: torch.Tensor = torch.linalg.vector_norm(difference, dim=-1)
    return norm.double().square_().flatten()
