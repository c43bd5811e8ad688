"""Defines the workloads of a mixture-of-experts layer: grouped GEMMs, permutations and routing.

A router sends each token to top_k of num_experts experts. A row is one token at one expert. With
expert parallelism, experts are spread over several GPUs (ranks). The rank with the most rows (the
busiest rank) determines the time, so `MoE` gives the FLOPs and GEMMs of this rank.
"""

from dataclasses import dataclass
from functools import cached_property
from itertools import cycle
from random import Random

from quantbench.errors import InputError, require_bools, require_choices, require_int, require_ints
from quantbench.workload.dtypes import GEMM_DTYPES, VECTOR_DTYPES, element_bytes
from quantbench.workload.ops import LAYOUTS, Gemm, require_multiple

_POWER_LAW = "power_law_"
_MOST_EXPERTS = 2**16
#: Directions of `Permute`: `permute` sorts rows by expert before the GEMMs, and `unpermute` adds up
#: each token's rows after the GEMMs.
PERMUTATIONS = ("permute", "unpermute")


@dataclass(frozen=True)
class GroupedGemm:
    """GEMMs of each expert's rows with its weights: c[rows, n] = a[rows, k] · b[expert, k, n].

    tokens_per_expert: number of rows of each expert, in order. An expert may have 0 rows, but not
        all experts.
    n, k: width and height of each expert's weights.
    layout: nn for weights stored as k×n, and nt for n×k. tn is the weight gradient, which sums over
        the rows: c[expert, k, n] = aᵀ[k, rows] · b[rows, n].

    >>> GroupedGemm((3, 0, 5), n=16, k=8).flops
    2048
    """

    tokens_per_expert: tuple[int, ...]
    n: int
    k: int
    dtype: str = "bf16"
    layout: str = "nn"

    kind = "grouped_gemm"

    def __post_init__(self) -> None:
        _require_counts("GroupedGemm", "tokens_per_expert", self.tokens_per_expert)
        require_ints(self, "n", "k", "rows")
        require_choices(self, dtype=GEMM_DTYPES, layout=LAYOUTS)

    @property
    def num_experts(self) -> int:
        """Number of experts, including those without rows."""
        return len(self.tokens_per_expert)

    @property
    def rows(self) -> int:
        """Total number of rows."""
        return sum(self.tokens_per_expert)

    def gemm(self, rows: int) -> Gemm:
        """Returns the GEMM of one expert with `rows` rows, at least 1."""
        if self.layout == "tn":
            return Gemm(self.k, self.n, rows, dtype=self.dtype, layout="tn")
        return Gemm(rows, self.n, self.k, dtype=self.dtype, layout=self.layout)

    @property
    def gemms(self) -> tuple[Gemm, ...]:
        """One GEMM for each expert that has rows."""
        distinct = {rows: self.gemm(rows) for rows in set(self.tokens_per_expert) if rows}
        return tuple(distinct[rows] for rows in self.tokens_per_expert if rows)

    @property
    def output_dtype(self) -> str:
        """Dtype of c, as in `Gemm`."""
        return self.gemm(1).output_dtype

    @property
    def flops(self) -> int:
        """Number of multiplications and additions, 2·rows·n·k."""
        return 2 * self.rows * self.n * self.k

    @property
    def min_bytes(self) -> int:
        """Minimum device-memory traffic in bytes.

        Rows, outputs, and the weights of experts with rows are moved once. In layout tn, zeros are
        also written as the weight gradients of experts without rows.
        """
        moved = sum(gemm.min_bytes for gemm in self.gemms)
        if self.layout == "tn":
            zeros = self.tokens_per_expert.count(0) * self.n * self.k
            moved += zeros * element_bytes(self.output_dtype)
        return moved

    def __str__(self) -> str:
        rows = f"{self.rows}/{self.num_experts}(≤{max(self.tokens_per_expert)})"
        return f"grouped gemm {rows}×{self.n}×{self.k} {self.dtype} {self.layout}"


@dataclass(frozen=True)
class Permute:
    """Copy of tokens to rows sorted by expert, or the weighted sum of each token's rows.

    The direction `permute` computes y[i] = x[order[i] // top_k], for a permutation `order` of the
    tokens · top_k rows. The direction `unpermute` computes y[t] = Σ weights[t, j] · x[order[t ·
    top_k + j]], with the sum over j < top_k.

    tokens: number of tokens.
    hidden: number of elements per token.
    top_k: number of rows per token.
    direction: one of PERMUTATIONS.

    >>> Permute(tokens=4, hidden=8, top_k=2).min_bytes
    256
    """

    tokens: int
    hidden: int
    top_k: int
    dtype: str = "bf16"
    direction: str = "permute"

    kind = "permute"

    def __post_init__(self) -> None:
        require_ints(self, "tokens", "hidden", "top_k", "rows")
        require_choices(self, dtype=VECTOR_DTYPES, direction=PERMUTATIONS)

    @property
    def rows(self) -> int:
        """Number of rows, tokens · top_k."""
        return self.tokens * self.top_k

    @property
    def flops(self) -> int:
        """Number of multiplications and additions in the weighted sum; 0 for copies."""
        return 2 * self.rows * self.hidden if self.direction == "unpermute" else 0

    @property
    def min_bytes(self) -> int:
        """Minimum device-memory traffic in bytes.

        Tokens, rows, weights and 8-byte indices are moved once.
        """
        weights = self.rows if self.direction == "unpermute" else 0
        elements = (self.tokens + self.rows) * self.hidden + weights
        return elements * element_bytes(self.dtype) + 8 * self.rows

    def __str__(self) -> str:
        return f"{self.direction} {self.tokens}×{self.hidden} top {self.top_k} {self.dtype}"


@dataclass(frozen=True)
class MoE:
    """Routed experts of one layer: the busiest rank's GEMMs, after dispatch and before combine.

    The experts are spread over `ep` ranks: rank r has the num_experts / ep experts from index
    r · num_experts / ep on. The busiest rank is the rank with the most rows.

    With `balanced`, all experts have the same number of rows, to within one. With
    `power_law_<exponent>`, each expert gets a random weight, as in aiconfigurator, which measures
    the busiest rank (ai-dynamo/aiconfigurator, collector/helper.py,
    `_generate_power_law_distribution`). The weight has the density x^-exponent on [1, 0.8 ·
    tokens], or on [0.01, 2] if there are no more rows than experts. Weights are scaled to a total
    of tokens · top_k rows and rounded, and no expert gets more rows than there are tokens. If the
    total is then too low, the ranks take turns to add one row to their expert with the fewest rows.
    If it is too high, the ranks take turns to remove one row from their expert with the most rows.
    The random generator is not aiconfigurator's (torch's), so a seed gives other rows of the same
    distribution. The weights of a histogram are scaled, rounded and corrected in the same way.

    tokens: number of tokens that the router sends to the experts of all ranks.
    hidden: width of the model.
    expert_ffn: width of one expert's MLP, before `tp` divides it.
    num_experts: number of experts in the layer.
    top_k: number of experts to which each token goes.
    tp: number of GPUs that share each expert, which divides expert_ffn.
    ep: number of ranks, which divides num_experts.
    gated: whether the MLP has a gate in addition to `up`. Gate and up are one GEMM of twice the
        width.
    distribution: balanced, power_law_<exponent>, or a histogram: a measured count for each expert.
    seed: random seed of a power law's weights.

    >>> layer = MoE(tokens=512, hidden=4096, expert_ffn=14336, num_experts=8, top_k=2, ep=4)
    >>> layer.rows_per_rank
    (256, 256, 256, 256)
    >>> [(name, str(gemm)) for name, gemm in layer.grouped_gemms().items()][1]
    ('experts_down', 'grouped gemm 256/2(≤128)×4096×14336 bf16 nt')
    """

    tokens: int
    hidden: int
    expert_ffn: int
    num_experts: int
    top_k: int
    dtype: str = "bf16"
    tp: int = 1
    ep: int = 1
    gated: bool = True
    distribution: str | tuple[int, ...] = "balanced"
    seed: int = 0

    kind = "moe"

    def __post_init__(self) -> None:
        who = "MoE"
        require_ints(self, "tokens", "hidden", "expert_ffn", "top_k", "tp", "ep")
        require_int(who, "num_experts", self.num_experts, high=_MOST_EXPERTS)
        require_ints(self, "seed", low=0)
        require_choices(self, dtype=GEMM_DTYPES)
        require_bools(self, "gated")
        if self.top_k > self.num_experts:
            most = f"at most num_experts = {self.num_experts}"
            raise InputError(who, f"top_k = {self.top_k}", most)
        require_multiple(self, "expert_ffn", "tp")
        require_multiple(self, "num_experts", "ep")
        _require_distribution(self.distribution, self.num_experts)

    @cached_property
    def tokens_per_expert(self) -> tuple[int, ...]:
        """Number of rows of each expert in the layer. The sum is tokens · top_k."""
        rows = self.tokens * self.top_k
        experts = self.num_experts
        if self.distribution == "balanced":
            return tuple((e + 1) * rows // experts - e * rows // experts for e in range(experts))
        if isinstance(self.distribution, tuple):
            weights = [float(count) for count in self.distribution]
        else:
            low, high = (0.01, 2.0)
            if rows > experts:
                low, high = (1.0, 0.8 * self.tokens)
            exponent = float(self.distribution.removeprefix(_POWER_LAW))
            share = Random(self.seed).random
            weights = [_power_law_quantile(share(), exponent, low, high) for _ in range(experts)]
        return _apportioned(weights, rows, most=self.tokens, ranks=self.ep)

    @property
    def rows_per_rank(self) -> tuple[int, ...]:
        """Number of rows of each expert-parallel rank."""
        return tuple(sum(self.experts_of(rank)) for rank in range(self.ep))

    @property
    def expected_rank_rows(self) -> float:
        """Mean number of rows per rank: tokens · top_k / ep."""
        return self.tokens * self.top_k / self.ep

    @cached_property
    def busiest_rank(self) -> int:
        """Index of the rank with the most rows; the first such rank if there are several."""
        rows = self.rows_per_rank
        return rows.index(max(rows))

    @property
    def rows_per_expert(self) -> float:
        """Mean number of rows per expert: tokens · top_k / num_experts."""
        return self.tokens * self.top_k / self.num_experts

    @property
    def routing_words(self) -> str:
        """Name of the distribution, such as `balanced`, `power_law_1.2` or `histogram`."""
        return "histogram" if isinstance(self.distribution, tuple) else self.distribution

    @property
    def skew(self) -> float:
        """Number of rows of the busiest rank, divided by `expected_rank_rows`; at least 1."""
        return self.rows_per_rank[self.busiest_rank] / self.expected_rank_rows

    def experts_of(self, rank: int) -> tuple[int, ...]:
        """Returns the number of rows of each expert on one rank."""
        require_int("MoE", "rank", rank, low=0, high=self.ep - 1)
        local = self.num_experts // self.ep
        return self.tokens_per_expert[rank * local : (rank + 1) * local]

    def grouped_gemms(self) -> dict[str, GroupedGemm]:
        """Returns the busiest rank's GEMMs by name.

        The names are `experts_up_gate` (or `experts_up` without a gate) and `experts_down`. Weights
        are stored as out×in, as in a linear layer.
        """
        rows = self.experts_of(self.busiest_rank)
        ffn = self.expert_ffn // self.tp
        name = "experts_up"
        width = ffn
        if self.gated:
            name = "experts_up_gate"
            width *= 2
        return {
            name: GroupedGemm(rows, width, self.hidden, self.dtype, "nt"),
            "experts_down": GroupedGemm(rows, self.hidden, ffn, self.dtype, "nt"),
        }

    @property
    def flops(self) -> int:
        """Number of multiplications and additions in the busiest rank's GEMMs."""
        return sum(gemm.flops for gemm in self.grouped_gemms().values())

    @property
    def min_bytes(self) -> int:
        """Minimum device-memory traffic of the busiest rank's GEMMs, in bytes."""
        return sum(gemm.min_bytes for gemm in self.grouped_gemms().values())

    def __str__(self) -> str:
        shape = f"{self.tokens}×{self.hidden}×{self.expert_ffn} {self.top_k} of {self.num_experts}"
        return f"moe {shape} tp {self.tp} ep {self.ep} {self.dtype} {self.routing_words}"


def _require_distribution(distribution: object, num_experts: int) -> None:
    """Raises InputError unless `MoE` accepts the distribution for num_experts experts."""
    expected = "balanced, power_law_<exponent above 0>, or a count for each expert"
    if isinstance(distribution, tuple):
        _require_counts("MoE", "distribution", distribution)
        if len(distribution) != num_experts:
            what = f"distribution of {len(distribution)} experts"
            raise InputError("MoE", what, f"num_experts = {num_experts}")
        return
    if distribution == "balanced":
        return
    name, law, exponent = str(distribution).partition(_POWER_LAW)
    try:
        valid = law and not name and 0 < float(exponent) < 100
    except ValueError:
        valid = False
    if not valid:
        raise InputError("MoE", f"distribution = {distribution!r}"[:80], expected)


def _require_counts(operation: str, name: str, counts: object) -> None:
    """Raises InputError unless `counts` is a tuple of integers that are at least 0 but not all 0.

    operation: name of the operation, for error messages.
    name: name of the counts, for error messages.
    """
    if not isinstance(counts, tuple) or not 1 <= len(counts) <= _MOST_EXPERTS:
        raise InputError(operation, f"{name} = {counts!r}"[:80], f"1 to {_MOST_EXPERTS} counts")
    for count in counts:
        require_int(operation, f"{name}'s count", count, low=0)
    if not any(counts):
        raise InputError(operation, f"{name} = all 0", "a count above 0")


def _power_law_quantile(share: float, exponent: float, low: float, high: float) -> float:
    """Returns a quantile of the distribution with density x^-exponent on [low, high].

    share: fraction of the distribution below the quantile.
    """
    if exponent == 1:
        return float(low * (high / low) ** share)
    power = 1 - exponent
    return float(((high**power - low**power) * share + low**power) ** (1 / power))


def _apportioned(weights: list[float], total: int, *, most: int, ranks: int) -> tuple[int, ...]:
    """Returns the number of rows of each expert, in proportion to the weights (see `MoE`).

    weights: one weight per expert.
    total: sum of all rows.
    most: maximum number of rows of one expert.
    ranks: number of ranks. Each rank has the same number of consecutive experts.
    """
    scale = total / sum(weights)
    rows = [min(round(weight * scale), most) for weight in weights]
    local = len(rows) // ranks
    members = [range(rank * local, (rank + 1) * local) for rank in range(ranks)]
    missing = total - sum(rows)
    step = 1 if missing > 0 else -1
    in_turn = cycle(members)
    while missing:
        expert = min(next(in_turn), key=lambda expert: step * rows[expert])
        if 0 <= rows[expert] + step <= most:
            rows[expert] += step
            missing -= step
    return tuple(rows)
