"""Computes the error of a result from its inputs and outputs, at a fraction of the result's cost.

The error of a whole output is ‖out − ref‖ / ‖ref‖, which must be at most the tolerance; where the
terms of the reference cancel, the norm before they cancel replaces ‖ref‖. The error of each row
must be at most 3.2 times the tolerance. The module also holds the tolerances, and references for
each workload that share no code with quantbench's kernels.
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
#: Ratio of a row's largest allowed error to the tolerance. `_freivalds` estimates the error of a
#: row, and P(χ²(8) > 8 · 3.2²) = 2e-14, so fewer than one in 10¹³ correct rows fails.
_ROW_FACTOR = 3.2
#: Attention is checked in one row of every stretch of this many rows.
TILE = 64

# Number of elements that are converted at once. On a CPU they fit into the cache of a core, and on
# CUDA they keep a GPU busy (128 MiB in float64).
_CHUNK_ELEMENTS = {"cpu": 2**17, "cuda": 2**24}
# Largest number of query-key pairs for which attention is recomputed in full.
_WHOLE_PAIRS = 2**21

# Tolerances of GEMMs, sums of permutations, softmax and attention, each with its reason, by dtype.
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
    # Sums and residuals are exact except for the rounding of float64. One wrong unit in 16384²
    # elements is an error of 1e-8.
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
    """Returns the bound on the relative error of a whole output.

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
            # 2⁻²⁴ · √k, and tf32 would have 3e-4.
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
    """Squared errors of some rows of one output, and the squared norms to which they are relative.

    what: name of the rows for messages, such as "rows of o".
    error: squared norm of the error of each row.
    norm: squared norm of the reference of each row, or the value that it would have without
        cancellation.
    """

    what: str
    error: torch.Tensor  # (rows,)
    norm: torch.Tensor  # (rows,)


def _joined(parts: Sequence[Rows]) -> Rows:
    """Joins rows of one output into one."""
    return Rows(
        parts[0].what,
        torch.cat([rows.error for rows in parts]),
        torch.cat([rows.norm for rows in parts]),
    )


def _joined_outputs(parts: Sequence[Sequence[Rows]]) -> list[Rows]:
    """Joins the rows of each output over all parts.

    parts: for each part, the rows of each output.
    """
    return [_joined(same) for same in zip(*parts, strict=True)]


def check(
    who: str,
    workload: Workload,
    inputs: Sequence[torch.Tensor],
    outputs: Sequence[torch.Tensor],
    generator: torch.Generator,
    *,
    must_see: Sequence[tuple[int, ...]] = (),
) -> float:
    """Returns the relative error of the worst output. `audit.check` runs the workload first.

    The references share no code with quantbench's kernels.

    who: operation for error messages.
    inputs, outputs: tensors of `Task.inputs` and `Task.outputs`, with correct shapes.
    generator: source of the random vectors and rows, with a seed that the provider cannot know.
    must_see: (sample, head, row) of the attention queries that must be recomputed.
    Raises MeasurementError that states the error and the bound, if the error is too large.
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
        found = _attention(workload, inputs, outputs, generator, must_see)
    return max(_judge(who, rows, bound, outputs) for rows in found)


def _judge(who: str, rows: Rows, bound: Tolerance, outputs: Sequence[torch.Tensor]) -> float:
    """Returns the relative error over all rows.

    Raises MeasurementError if this error exceeds the bound, or if the error of one row exceeds 3.2
    times the bound.
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
    """Returns √(error / norm), which is 0 if the error is 0, and NaN if either is NaN."""
    return torch.where(error == 0, norm.isnan() * norm, error / norm).sqrt()


def _not_finite(output: torch.Tensor) -> int:
    """Returns the number of elements of an output that are infinite or NaN."""
    found = 0
    if output.dtype.is_floating_point:
        for _, part in row_chunks(output.reshape(1, -1, output.shape[-1])):
            found += int((~part.isfinite()).sum())
    return found


def fast_format() -> torch.dtype:
    """Returns fp32, or float64 if a provider lowered the process-wide fp32 matmul precision."""
    return torch.float32 if torch.get_float32_matmul_precision() == "highest" else torch.float64


def _precision(workload: Workload) -> torch.dtype:
    """Returns the dtype in which a check sums up.

    The dtype is that of `fast_format` if the tolerance is 1e-3 or more, else float64.
    """
    return fast_format() if tolerance(workload).relative_norm >= 1e-3 else torch.float64


def row_chunks(matrices: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yields chunks of consecutive rows of matrices, each with the slice of its rows.

    The matrices have the shape (group, rows, cols).
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
    square: ‖M‖² over all matrices; 0 if it was not requested.
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
    """Multiplies matrices by a few vectors on the left and on the right.

    Each chunk of the matrices is read and converted once, in the order in which it is stored.

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
    # A GEMM whose result has few rows is faster than one whose result has few columns.
    right_rows = right.mT.contiguous()
    rights = []
    squares = [left.new_zeros(())]
    buffer = left.new_empty(0)
    for part, chunk in row_chunks(matrices):
        # One buffer serves all chunks, because new memory costs more than the conversion on a CPU.
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
    # Number of matrices of the batch that are checked together, such that a chunk of elements
    # holds 64 rows of each matrix.
    longest = max(work.m, work.n, work.k)
    together = max(1, _CHUNK_ELEMENTS[c.device.type] // (64 * longest))
    chunks = zip(*(matrix.split(together) for matrix in matrices), strict=True)
    compute = _precision(work)
    return _joined_outputs([_freivalds(a, b, c, generator, compute) for a, b, c in chunks])


def _grouped(
    work: GroupedGemm, inputs: Sequence[torch.Tensor], c: torch.Tensor, generator: torch.Generator
) -> list[Rows]:
    """Checks the rows and columns of each expert of a grouped GEMM by `_freivalds`."""
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
    """Checks every row of a permutation, which it recomputes in chunks. Copies must be exact."""
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
    """Estimates the error of each row and column of c − a·b by Freivalds' check.

    For 8 random normal vectors x and y, c·x is compared with a·(b·x) and yᵀ·c with (yᵀ·a)·b, which
    costs O(mn + nk + mk) instead of O(mnk). Sums are taken in fp32 if the tolerance is 1e-3 or
    more, else in float64 (fp32 and int8 GEMMs).

    If the error of a row is the vector e, the residual of each random vector is normal with
    standard deviation ‖e‖, so the mean square over 8 vectors is ‖e‖² · χ²(8) / 8. A correct row
    fails with probability 2e-14. A row or column whose error is over 32 times the tolerance passes
    with probability 1e-7, and one whose error is over 13 times the tolerance passes with
    probability 1e-4. Errors in many rows or columns add up: an error over 1.5 times the tolerance
    in the whole output is found, and so is a tile of 128×128 that was left out of a result of
    16384×16384.

    Errors are relative to the norm that a·b is expected to have for random a and b of the measured
    norms, or to the norm of c as estimated by the same vectors, whichever is larger.

    a, b, c: matrices (group, m, k), (group, k, n) and (group, m, n).
    compute: dtype of the sums.
    """
    group, m, n = c.shape
    k = a.shape[-1]

    def vectors(*shape: int) -> torch.Tensor:
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

    first_row: index of the first row within the whole matrix.
    """
    return torch.ones(rows, cols, dtype=torch.bool, device=device).triu(diagonal=1 + first_row)


def softmax(x: torch.Tensor, scale: float, dropped: torch.Tensor | None) -> torch.Tensor:
    """Computes softmax(scale · x) over the last dimension, in the dtype of x.

    dropped: boolean mask, True for the elements that are left out; None for no mask.
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
    """Checks every row of a softmax or of its gradient, which it recomputes in chunks.

    bound: the tolerance, as a relative error.
    """
    x = inputs[0]
    compute = _precision(work)
    samples, heads, rows, cols = x.shape
    # A result below the smallest number of its format becomes 0, which is no error.
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
            # The norm ignores the cancellation between the two terms, by which correct results lose
            # digits.
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
    must_see: Sequence[tuple[int, ...]],
) -> list[Rows]:
    """Checks one random query row of every TILE rows of every head by computing it in full.

    If the problem is small, all rows are checked. In the backward pass the same rows of the
    gradient of q are checked, and one random row of every TILE rows of the gradients of k and v. A
    wrong block of TILE aligned rows is always found. Errors in a fraction s of the rows are missed
    with probability (1 − s)^(number of rows checked).

    must_see: (sample, head, row) of queries that must be checked.
    """
    tile = 1 if work.batch * work.heads * work.seq_q * work.seq_k <= _WHOLE_PAIRS else TILE
    group = work.heads // work.kv_heads
    parts = []
    for sample, head in product(range(work.batch), range(work.kv_heads)):
        heads = slice(head * group, (head + 1) * group)
        queries = _one_of_each(work.seq_q, tile, generator)
        for in_sample, in_head, row in must_see:
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
    """Draws a random index from each stretch of `tile` indices in 0 … size − 1."""
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
    """Checks the rows `queries` of o, for one key head of one sample.

    q, o: the query heads that share the key head (heads, seq_q, head_dim).
    k, v: the key head (seq_k, head_dim).
    queries: indices of the rows to check (rows,).
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
    """Checks some rows of dq, dk and dv for one key head of one sample.

    The rows are `queries` of dq, and `keys` of dk and dv. The gradient of the scores is ds = p·(dp
    − δ), where δ is the mean of dp under p. Errors are relative to the norms of the terms before
    they cancel.

    q, gradient: the query heads that share the key head, and the gradient of o (heads, seq_q,
        head_dim).
    k, v: the key head (seq_k, head_dim).
    results: dq, dk and dv as the provider computed them.
    queries, keys: indices of the rows to check.
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
        # Where the terms of dp cancel, as in the first causal rows, dp is small but its rounding
        # error is not. The norm of dp is therefore at least that of its terms.
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
    """Returns the probabilities of q over all keys (heads, rows, seq_k).

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
