"""Checks whether sizes are the multiples that number formats and libraries require.

`broken_rules` checks one workload, and `broken_by_shape` a transformer. `RULES` lists the rules,
each with the threads, documentation or source files behind it. All sources were read in 2026-11.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from quantbench.device.spec import DeviceSpec
from quantbench.quantization import VECTOR_BYTES, cdiv
from quantbench.rules import Rule
from quantbench.workload import Attention, Gemm, GroupedGemm, Op, TransformerShape
from quantbench.workload.dtypes import DTYPES, GEMM_DTYPES

# Effects of a broken rule, worst first. `crashes`: the library raises an error. `falls back`: the
# library runs a slower kernel, mostly without a message. `wastes`: the library pads to the next
# allowed size.
EFFECTS = ("crashes", "falls back", "wastes")
# Number of rows per expert that breaks no rule, for checks of the experts' weights alone.
_FULLY_ALIGNED_ROWS = 128

# Names of m, n and k in terms of the shape, for each forward GEMM of `TransformerShape.ops`.
_FORWARD = {
    "qkv": ("tokens", "qkv width / tp", "hidden"),
    "latent_down": ("tokens", "q_rank + kv_rank + rope_dim", "hidden"),
    "q_up": ("tokens", "heads · head_dim / tp", "q_rank or hidden"),
    "kv_up": ("tokens", "heads · (head_dim - rope_dim + value_dim) / tp", "kv_rank"),
    "scores": ("seq", "seq", "head_dim"),
    "context": ("seq", "head_dim", "seq"),
    "proj": ("tokens", "hidden", "heads · head_dim / tp"),
    "mlp_up": ("tokens", "ffn / tp", "hidden"),
    "mlp_gate": ("tokens", "ffn / tp", "hidden"),
    "mlp_up_gate": ("tokens", "2 · ffn / tp", "hidden"),
    "mlp_down": ("tokens", "hidden", "ffn / tp"),
    "shared_up": ("tokens", "shared_ffn / tp", "hidden"),
    "shared_gate": ("tokens", "shared_ffn / tp", "hidden"),
    "shared_up_gate": ("tokens", "2 · shared_ffn / tp", "hidden"),
    "shared_down": ("tokens", "hidden", "shared_ffn / tp"),
    "experts_up": ("rows", "moe_ffn / tp", "hidden"),
    "experts_up_gate": ("rows", "2 · moe_ffn / tp", "hidden"),
    "experts_down": ("rows", "hidden", "moe_ffn / tp"),
    "logits": ("tokens", "vocab / tp", "hidden"),
}


@dataclass(frozen=True)
class AlignmentRule(Rule):
    """Rule about the sizes that a library or a number format requires.

    dtypes: input dtypes to which the rule applies.
    sides: sides to which the rule applies. They are m, n or k of a GEMM, `rows` (the lengths of the
        operands' rows), `rows of an expert`, head_dim, or `tokens / tp` (the tokens that each GPU
        quantizes with sequence parallelism).
    multiple: required divisor of the size, or the sizes to which a kernel pads, in ascending order.
    effect: one of EFFECTS.
    whose: software that has the rule, for texts.
    libraries: values of `--library` to which the rule applies; () for all.
    phases: values of `Op.phase` to which the rule applies; () for all.
    min_tp: lowest tensor-parallel degree at which the rule applies.
    training: whether the rule applies only to training steps.
    capability: lowest CUDA compute capability on which the software runs.
    """

    dtypes: tuple[str, ...]
    sides: tuple[str, ...]
    multiple: int | tuple[int, ...]
    effect: str
    whose: str
    libraries: tuple[str, ...] = ()
    phases: tuple[str, ...] = ()
    min_tp: int = 1
    training: bool = False
    capability: tuple[int, int] = (0, 0)

    def concerns(
        self, dtype: str, library: str, tp: int, *, training: bool, device: DeviceSpec | None
    ) -> bool:
        """Returns whether the rule applies. The arguments are those of `broken_rules`."""
        if device is not None and (device.compute_capability or (0, 0)) < self.capability:
            return False
        named = not library or not self.libraries or library in self.libraries
        in_use = tp >= self.min_tp and (training or not self.training)
        return named and in_use and dtype in self.dtypes

    def allowed(self, size: int) -> int:
        """Returns the smallest allowed size that is at least `size`.

        If `size` exceeds every size to which a kernel pads, the result is `size` itself.
        """
        if isinstance(self.multiple, int):
            return cdiv(size, self.multiple) * self.multiple
        return next((step for step in self.multiple if step >= size), size)


@dataclass(frozen=True)
class Broken:
    """Size that breaks a rule.

    name: name of the side in terms of the shape, such as `ffn / tp`.
    size: size of the side.
    to: next allowed size.
    ops: labels of the ops that break the rule.
    """

    rule: AlignmentRule
    name: str
    size: int
    to: int
    ops: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """Text with the broken rule, its effect and the next allowed size.

        Example: `ffn / tp = 688 is no multiple of 128: crashes in vLLM, SGLang (…); next: 768`.
        """
        multiple = self.rule.multiple
        what = "between a kernel's widths"
        if isinstance(multiple, int):
            what = f"no multiple of {multiple}"
        effect = f"{self.rule.effect} in {self.rule.whose} ({self.rule.claim})"
        return f"{self.name} = {self.size} is {what}: {effect}; next: {self.to}"


# Beginnings of source addresses, and values of `AlignmentRule.libraries` and `.capability`.
_FLASH_ATTENTION = "https://github.com/Dao-AILab/flash-attention"
_VLLM = "https://github.com/vllm-project/vllm"
_TE = "https://github.com/NVIDIA/TransformerEngine"
_SERVING = ("vllm", "sglang")
# Lowest compute capabilities of DeepGEMM and FlashAttention. Source: their READMEs.
_DEEPGEMM = (9, 0)
_FLASH = (8, 0)
_TRAINING = ("torch",)

#: All rules. The rule on rows of 16 bytes comes first, because it applies to every library.
RULES = (
    AlignmentRule(
        "rows-16-bytes", "rows start at multiples of 16 bytes",
        "tensor cores run slower or not at all, and TMA cannot load such rows",
        ("https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication/",
        "https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__TENSOR__MEMORY.html"),
        GEMM_DTYPES, ("rows",), VECTOR_BYTES, "falls back", "every library",
    ),
    AlignmentRule(
        "fp8-n-k-16-torch", "n % 16 == 0 and k % 16 == 0", "both sides of the weight are checked",
        ("https://github.com/pytorch/pytorch/blob/main/aten/src/ATen/native/cuda/ScaledBlas.cpp",),
        ("fp8",), ("n", "k"), 16, "crashes", "torch._scaled_mm", _TRAINING,
    ),
    AlignmentRule(
        "fp8-m-8-te", "m % 8 == 0", "rows are checked before an fp8 product",
        (f"{_TE}/issues/1422", f"{_TE}/pull/317"),
        ("fp8",), ("m",), 8, "crashes", "Transformer Engine", _TRAINING, ("forward", "dgrad"),
        training=True,
    ),
    AlignmentRule(
        "fp8-n-k-16-cutlass", "n % 16 == 0 and k % 16 == 0",
        "weights are padded once, a or c in each call",
        (f"{_VLLM}/pull/48588",),
        ("fp8",), ("n", "k"), 16, "wastes", "vLLM's CUTLASS kernel", _SERVING, ("forward",),
    ),
    AlignmentRule(
        "fp8-block-n-k-128-serving", "n % 128 == 0 and k % 128 == 0",
        "tp cuts a block of scales: weights do not load",
        (f"{_VLLM}/issues/42384", f"{_VLLM}/issues/52997",
        "https://github.com/sgl-project/sglang/issues/3345"),
        ("fp8_block",), ("n", "k"), 128, "crashes", "vLLM and SGLang", _SERVING, ("forward",),
        min_tp=2,
    ),
    AlignmentRule(
        "fp8-block-n-64-vllm", "n % 64 == 0", "DeepGEMM is left for CUTLASS or Triton",
        (f"{_VLLM}/blob/main/vllm/utils/deep_gemm.py",),
        ("fp8_block",), ("n",), 64, "falls back", "vLLM", ("vllm",), ("forward",),
        capability=_DEEPGEMM,
    ),
    AlignmentRule(
        "fp8-block-k-128-vllm", "k % 128 == 0", "DeepGEMM is left for CUTLASS or Triton",
        (f"{_VLLM}/blob/main/vllm/utils/deep_gemm.py",),
        ("fp8_block",), ("k",), 128, "falls back", "vLLM", ("vllm",), ("forward",),
        capability=_DEEPGEMM,
    ),
    AlignmentRule(
        "fp8-block-expert-rows-128-deepgemm", "rows of an expert % 128 == 0",
        "the contiguous layout pads every expert",
        ("https://github.com/deepseek-ai/DeepGEMM/issues/15",
        "https://github.com/deepseek-ai/DeepGEMM/issues/98"),
        ("fp8_block",), ("rows of an expert",), 128, "wastes", "DeepGEMM", capability=_DEEPGEMM,
    ),
    AlignmentRule(
        "mxfp8-n-k-32-te", "n % 32 == 0 and k % 32 == 0",
        "the quantizer needs whole blocks both ways",
        (f"{_TE}/issues/2966",),
        ("mxfp8",), ("n", "k"), 32, "crashes", "Transformer Engine", _TRAINING,
    ),
    AlignmentRule(
        "mxfp8-m-32-te", "m % 32 == 0", "the quantizer needs whole blocks both ways",
        ("https://github.com/modelscope/ms-swift/issues/9723",),
        ("mxfp8",), ("m",), 32, "crashes", "Transformer Engine", _TRAINING, training=True,
    ),
    AlignmentRule(
        "mxfp8-tokens-32-te", "tokens / tp % 32 == 0", "each GPU quantizes its part of the tokens",
        ("https://github.com/modelscope/ms-swift/pull/9722",),
        ("mxfp8",), ("tokens / tp",), 32, "crashes",
        "Transformer Engine with sequence parallelism", _TRAINING,
        min_tp=2, training=True,
    ),
    AlignmentRule(
        "mxfp8-expert-rows-32-te", "rows of an expert % 32 == 0",
        "each expert's rows are quantized",
        (f"{_TE}/issues/2966",),
        ("mxfp8",), ("rows of an expert",), 32, "crashes", "Transformer Engine", _TRAINING,
    ),
    AlignmentRule(
        "nvfp4-n-k-16-te", "n % 16 == 0 and k % 16 == 0",
        "the quantizer needs whole blocks both ways",
        (f"{_TE}/blob/main/transformer_engine/pytorch/csrc/quantizer.cpp",),
        ("nvfp4",), ("n", "k"), 16, "crashes", "Transformer Engine", _TRAINING,
    ),
    AlignmentRule(
        "nvfp4-m-16-te", "m % 16 == 0", "the quantizer needs whole blocks both ways",
        (f"{_TE}/blob/main/transformer_engine/pytorch/csrc/quantizer.cpp",),
        ("nvfp4",), ("m",), 16, "crashes", "Transformer Engine", _TRAINING, training=True,
    ),
    AlignmentRule(
        "nvfp4-n-k-32-serving", "n % 32 == 0 and k % 32 == 0",
        "weights are padded once, a in each call if k is",
        (f"{_VLLM}/pull/31099", "https://github.com/sgl-project/sglang/pull/17300"),
        ("nvfp4",), ("n", "k"), 32, "wastes", "vLLM and SGLang", _SERVING, ("forward",),
    ),
    AlignmentRule(
        "fp16-head-dim-8-flash", "head_dim % 8 == 0", "q, k and v are copied to padded tensors",
        (f"{_FLASH_ATTENTION}/blob/main/flash_attn/flash_attn_interface.py",),
        ("fp16", "bf16"), ("head_dim",), 8, "wastes", "FlashAttention", capability=_FLASH,
    ),
    AlignmentRule(
        "fp16-head-dim-widths-flash", "head_dim in (32, 64, 96, 128, 192, 256)",
        "its kernels exist for these widths only",
        (f"{_FLASH_ATTENTION}/issues/1141",
        f"{_FLASH_ATTENTION}/blob/main/csrc/flash_attn/src/static_switch.h"),
        ("fp16", "bf16"), ("head_dim",), (32, 64, 96, 128, 192, 256), "wastes", "FlashAttention",
        capability=_FLASH,
    ),
)  # fmt: skip


def crash_rules(dtype: str, library: str, device: DeviceSpec) -> list[AlignmentRule]:
    """Returns the rules of a dtype and library that name a crash; "" for every library."""
    found = []
    for rule in RULES:
        concerned = rule.concerns(dtype, library, rule.min_tp, training=True, device=device)
        if concerned and rule.effect == "crashes":
            found.append(rule)
    return found


def broken_rules(
    work: Gemm | GroupedGemm | Attention,
    *,
    library: str = "",
    phase: str = "forward",
    tp: int = 1,
    training: bool = False,
    device: DeviceSpec | None = None,
) -> tuple[Broken, ...]:
    """Returns the rules that a workload on one GPU breaks.

    library: library whose kernels run, as for `--library`; "" for all libraries' rules.
    phase: phase of the op, as in `Op.phase`.
    tp: tensor-parallel degree. The workload's sizes are already divided by it.
    training: whether the workload is part of a training step.
    device: constants of the GPU; None for all GPUs' rules.

    >>> gemm = Gemm(4096, 4096, 688, dtype="fp8_block")
    >>> [broken.to for broken in broken_rules(gemm, library="vllm", tp=8)]
    [768, 768]
    """
    found: list[Broken] = []
    for rule in RULES:
        concerned = rule.concerns(work.dtype, library, tp, training=training, device=device)
        if concerned and phase in (rule.phases or (phase,)):
            found += _broken(rule, work)
    return tuple(found)


def _broken(rule: AlignmentRule, work: Gemm | GroupedGemm | Attention) -> Iterator[Broken]:
    """Yields each of a workload's sizes that breaks the rule."""
    if "rows" in rule.sides and isinstance(work, Gemm | GroupedGemm):
        gemm = work if isinstance(work, Gemm) else work.gemm(_FULLY_ALIGNED_ROWS)
        for side, step in misaligned_sides(gemm).items():
            size = getattr(gemm, side)
            yield Broken(replace(rule, multiple=step), side, size, cdiv(size, step) * step)
    if "rows of an expert" in rule.sides and isinstance(work, GroupedGemm):
        padded = sum(rule.allowed(rows) for rows in work.tokens_per_expert if rows)
        if padded != work.rows:
            name = f"rows of {work.num_experts} experts, one or more"
            yield Broken(rule, name, work.rows, padded)
    for side in rule.sides:
        # A grouped GEMM has no m, and attention has only head_dim.
        size = getattr(work, side, None) if side in ("m", "n", "k", "head_dim") else None
        if size is not None and rule.allowed(size) != size:
            yield Broken(rule, side, size, rule.allowed(size))


def broken_by_shape(
    shape: TransformerShape,
    *,
    library: str = "",
    backward: bool = True,
    device: DeviceSpec | None = None,
) -> tuple[Broken, ...]:
    """Returns the rules that a transformer's ops break at its tp, worst effect first.

    Each rule is listed once per named size. Logits are checked in the dtype of attention, because
    FP8 and FP4 recipes do not quantize the output head (DeepSeek-V3, arXiv:2412.19437, section
    3.3).

    library, device: as in `broken_rules`.
    backward: whether to check a training step (with gradients) rather than the forward pass alone.
    """
    found: dict[tuple[AlignmentRule, str, int, int], list[str]] = {}
    for op in shape.ops(backward=backward):
        if not isinstance(work := op.workload, Gemm | GroupedGemm | Attention):
            continue
        if op.name == "logits" and isinstance(work, Gemm):
            work = replace(work, dtype=shape.attention_dtype, accumulate="")
        # With latent attention, the op's head_dim is the mean width of keys and values. The rules
        # apply to the shape's head_dim.
        if isinstance(work, Attention):
            work = replace(work, head_dim=shape.head_dim)
        names = side_names(op)
        broken = broken_rules(
            work, library=library, phase=op.phase, tp=shape.tp, training=backward, device=device
        )
        for one in broken:
            key = (one.rule, names.get(one.name, one.name), one.size, one.to)
            found.setdefault(key, []).append(op.label)
    part = shape.tokens // shape.tp
    for rule in RULES:
        if "tokens / tp" not in rule.sides:
            continue
        concerned = rule.concerns(shape.dtype, library, shape.tp, training=backward, device=device)
        if concerned and shape.tokens % (rule.allowed(1) * shape.tp):
            found[rule, "tokens / tp", part, rule.allowed(part + 1)] = ["all"]
    made = [Broken(*key, tuple(dict.fromkeys(ops))) for key, ops in found.items()]
    return tuple(sorted(made, key=lambda one: EFFECTS.index(one.rule.effect)))


def runs_without_crash(shape: TransformerShape, *, library: str, device: DeviceSpec) -> bool:
    """Returns whether a shape breaks no rule that names a crash.

    library, device: as in `broken_rules`.
    """
    # Most shapes have a dtype that no such rule is about. Their ops are not looked at.
    if not crash_rules(shape.dtype, library, device):
        return True
    broken = broken_by_shape(shape, library=library, backward=not shape.experts, device=device)
    return all(one.rule.effect != "crashes" for one in broken)


def side_names(op: Op) -> dict[str, str]:
    """Returns the names of an op's `m`, `n` and `k` in terms of the shape.

    The result is {} for an op that is not a GEMM.

    >>> from quantbench.workload import TransformerShape
    >>> ops = TransformerShape(hidden=1024, heads=16, seq=512).ops()
    >>> side_names(next(op for op in ops if op.label == "mlp_up.wgrad"))
    {'m': 'ffn / tp', 'n': 'hidden', 'k': 'tokens'}
    """
    if op.name not in _FORWARD or op.workload.kind not in ("gemm", "grouped_gemm"):
        return {}
    m, n, k = _FORWARD[op.name]
    if op.phase == "dgrad":
        n, k = k, n
    elif op.phase == "wgrad":
        # A gradient has the storage of its tensor: weights are stored as n×k, and the values in
        # context as k×n.
        m, n, k = (k, n, m) if op.name == "context" else (n, k, m)
    return {"m": m, "n": n, "k": k}


def row_steps(gemm: Gemm) -> dict[str, int]:
    """Returns the multiple that each side needs for rows aligned to 16 bytes, by side.

    The sides are the row lengths: those of a and b (`Gemm.contiguous_dims`), and n for c.
    """
    step = VECTOR_BYTES * DTYPES[gemm.dtype].packed // DTYPES[gemm.dtype].element_bytes
    rows = dict.fromkeys(gemm.contiguous_dims, step)
    rows["n"] = max(rows.get("n", 1), VECTOR_BYTES // DTYPES[gemm.output_dtype].element_bytes)
    return rows


def misaligned_sides(gemm: Gemm) -> dict[str, int]:
    """Returns the sides of `row_steps` whose size is not the required multiple, with the multiple.

    >>> misaligned_sides(Gemm(m=100, n=150, k=64))
    {'n': 8}
    """
    return {side: step for side, step in row_steps(gemm).items() if getattr(gemm, side) % step}
