"""Flash attention against float64, in triton's interpreter and on the GPU where there is one.

Tolerances: ‖out − ref‖ / ‖ref‖, as for every provider (quantbench.providers.correctness).
"""

from collections.abc import Callable
from dataclasses import replace
from math import e, log2
from typing import Any

import pytest
import references
import torch
from hypothesis import given
from hypothesis import strategies as st
from interpreter import ACTIVE, EXAMPLES, in_interpreter
from quantbench.kernels.attention import (
    AttentionPlan,
    attention,
    heads_side_by_side,
    plan_backward,
    plan_forward,
)
from quantbench.kernels.attention.menu import (
    WITH_DESCRIPTORS,
    Loads,
    Setting,
    architecture,
    backward_tiles,
    forward_menu,
    held_columns,
    split_head_dim,
)
from quantbench.kernels.attention.operands import Checked, too_old
from references import relative_error

from quantbench.errors import InputError, QuantbenchError, UnsupportedError
from quantbench.launch import Tile
from quantbench.providers import correctness
from quantbench.providers.correctness import tolerance
from quantbench.workload import Attention

NAN = float("nan")
TORCH = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
SMALL = Tile(32, 32, num_warps=4, stages=2)
Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def operands_of(
    work: Attention, seed: int = 0, device: str = "cpu", beside: int = 0, swapped: bool = False
) -> Operands:
    """q, k, v and a gradient of o. beside: NaN rows that stand in memory before and after the rows
    of every head, and NaN elements after those of every row: nothing may read them. swapped: stored
    [batch, seq, heads, head_dim]."""
    generator = torch.Generator(device=device).manual_seed(seed)
    rows, cols = slice(beside, None), slice(0, work.head_dim)

    def tensor(heads: int, seq: int) -> torch.Tensor:
        first, second = (seq + 2 * beside, heads) if swapped else (heads, seq + 2 * beside)
        whole = torch.full(
            (work.batch, first, second, work.head_dim + 8 * beside), NAN, device=device
        )
        x = whole.to(TORCH[work.dtype]).transpose(1, 2) if swapped else whole.to(TORCH[work.dtype])
        x = x[:, :, rows, cols][:, :, :seq]
        return x.copy_(torch.randn(x.shape, generator=generator, device=device))

    q, do = tensor(work.heads, work.seq_q), tensor(work.heads, work.seq_q)
    return q, tensor(work.kv_heads, work.seq_k), tensor(work.kv_heads, work.seq_k), do


def poisoned(plan: AttentionPlan) -> AttentionPlan:
    for output in plan.outputs:
        output.fill_(NAN)
    return plan


def check_both_ways(work: Attention, tensors: Operands, **options: Any) -> None:
    """Forward, its row statistics, and backward, each output poisoned first."""
    q, k, v, do = tensors
    forward = poisoned(plan_forward(q, k, v, causal=work.causal, **options))
    forward.run()
    o, lse = forward.outputs
    assert relative_error(o, references.attention(work, q, k, v)) < tolerance(work).relative_norm
    exact = exact_lse(work, q, k)
    assert bool(((lse - exact).abs() <= 1e-4 * (1 + exact.abs())).all())
    path = {"operands": options["operands"]} if "operands" in options else {}
    backward = poisoned(plan_backward(q, k, v, o, lse, do, causal=work.causal, **path))
    backward.run()
    bound = tolerance(replace(work, direction="backward")).relative_norm
    for gradient, expected in zip(
        backward.outputs, references.attention_backward(work, q, k, v, do), strict=True
    ):
        assert relative_error(gradient, expected) < bound


def exact_lse(work: Attention, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    scores = (
        q.double()
        @ k.double().repeat_interleave(work.heads // work.kv_heads, dim=1).mT
        * work.head_dim**-0.5
    )
    if work.causal:
        scores = scores.masked_fill(
            correctness.causal_mask(work.seq_q, work.seq_k, q.device), -torch.inf
        )
    return scores.logsumexp(-1) * log2(e)


@st.composite
def workloads(draw: st.DrawFn) -> Attention:
    kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2))
    causal = draw(st.booleans())
    seq_q = draw(st.integers(1, 70))
    return Attention(
        batch=draw(st.integers(1, 2)), heads=kv_heads * group, kv_heads=kv_heads, seq_q=seq_q,
        seq_k=seq_q if causal else draw(st.integers(1, 70)), head_dim=draw(st.integers(8, 80)),
        dtype=draw(st.sampled_from(["fp16", "fp32"])), causal=causal,
    )  # fmt: skip


@in_interpreter
@pytest.mark.slow
@EXAMPLES
@given(workloads())
def test_any_shape(work: Attention) -> None:
    check_both_ways(work, operands_of(work))


# Not powers of two (40, 96, 192), not multiples of 16 (40, 100, 150), not of 8 (100, 150).
@in_interpreter
@pytest.mark.parametrize("head_dim", [40, 96, 100, 128, 150, 192, 256])
def test_head_dims(head_dim: int) -> None:
    work = Attention(1, 2, 37, 37, head_dim, kv_heads=1, dtype="fp16")
    check_both_ways(work, operands_of(work))


@in_interpreter
@pytest.mark.parametrize("schedule", ["plain", "overlapped"])
@pytest.mark.parametrize(("block_m", "block_n"), [(32, 32), (64, 16), (16, 64)])
@pytest.mark.parametrize(("seq_q", "seq_k", "causal"), [(70, 70, True), (40, 70, False)])
def test_blocks_and_schedules(
    schedule: str, block_m: int, block_n: int, seq_q: int, seq_k: int, causal: bool
) -> None:
    work = Attention(1, 2, seq_q, seq_k, 24, kv_heads=1, dtype="fp16", causal=causal)
    tile = Tile(block_m, block_n, num_warps=4, stages=2)
    check_both_ways(work, operands_of(work), tile=tile, schedule=schedule)


@in_interpreter
@pytest.mark.parametrize("path", ["pointers", "descriptors"])
@pytest.mark.parametrize("swapped", [False, True])
def test_nothing_is_read_beside_the_operands(path: str, swapped: bool) -> None:
    work = Attention(2, 2, 40, 40, 40, kv_heads=1, dtype="fp16")
    operands = operands_of(work, beside=3, swapped=swapped)
    check_both_ways(work, operands, operands=path, tile=SMALL, schedule="plain")


@in_interpreter
@pytest.mark.parametrize("expanded", [False, True])
def test_gradients_through_autograd(expanded: bool) -> None:
    work = Attention(1, 2, 40, 40, 16, kv_heads=1, dtype="fp32")
    q, k, v, do = operands_of(work)
    if expanded:
        do = torch.ones(()).expand_as(q)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    attention(q, k, v).backward(do)
    expected = references.attention_backward(work, *(x.detach() for x in inputs), do)
    for x, gradient in zip(inputs, expected, strict=True):
        assert x.grad is not None
        assert relative_error(x.grad, gradient) < 2e-4


@in_interpreter
def test_a_scale_of_ones_own() -> None:
    work = Attention(1, 1, 30, 30, 16, dtype="fp32", causal=False)
    q, k, v, _ = operands_of(work)
    out = attention(q, k, v, causal=False, scale=0.5)
    expected = correctness.softmax(q.double() @ k.double().mT, 0.5, None) @ v.double()
    assert relative_error(out, expected) < 1e-4


@in_interpreter
def test_large_scores_neither_overflow_nor_vanish() -> None:
    work = Attention(1, 1, 40, 40, 16, dtype="fp32")
    q, k, v, do = operands_of(work)
    check_both_ways(work, (30 * q, 30 * k, v, do), tile=SMALL)


@in_interpreter
def test_a_plan_tells_its_launches_and_runs_again() -> None:
    work = Attention(2, 4, 100, 100, 64, kv_heads=2, dtype="fp16")
    q, k, v, do = operands_of(work)
    out, lse = torch.empty_like(q), torch.empty(2, 4, 100)
    tile = Tile(32, 64, num_warps=4, stages=3)
    plan = plan_forward(q, k, v, tile=tile, schedule="plain", out=out, lse=lse)
    assert plan.outputs[0] is out
    assert plan.outputs[1] is lse
    assert (plan.launch.kernel, plan.launch.grid) == ("attention_forward", (4 * 8, 1, 1))
    assert plan.launch.tile == tile
    assert plan.setting == Setting(tile, "plain")
    plan.run()
    first = out.clone()
    poisoned(plan).run()
    assert torch.equal(out, first)
    backward = plan_backward(q, k, v, out, lse, do, kv_tile=Tile(32, 64), q_tile=Tile(16, 32))
    assert [(launch.kernel, launch.grid) for launch in backward.launches] == [
        ("attention_delta", (16, 1, 1)),
        ("attention_backward_kv", (2 * 4, 1, 1)),
        ("attention_backward_q", (7 * 8, 1, 1)),
    ]
    assert backward.launch.kernel == "attention_backward_kv"


@in_interpreter
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, Setting(Tile(128, 128, stages=2, num_warps=8), "overlapped")),
        ({"schedule": "plain"}, Setting(Tile(128, 128, stages=2, num_warps=8), "plain")),
        ({"tile": Tile(64, 32)}, Setting(Tile(64, 32, stages=2, num_warps=4), "overlapped")),
    ],
)
def test_what_a_tile_leaves_open_comes_from_the_menu(
    options: dict[str, Any], expected: Setting
) -> None:
    q, k, v, _ = operands_of(Attention(1, 1, 20, 20, 128, dtype="fp16"))
    assert plan_forward(q, k, v, **options).setting == expected
    by_pointers = plan_forward(q, k, v, operands="pointers").setting
    assert by_pointers.schedule == "plain"


HALF = operands_of(Attention(1, 4, 20, 20, 32, kv_heads=2, dtype="fp16"))
Q, K, V, DO = HALF
LSE = torch.zeros(1, 4, 20)


@in_interpreter
@pytest.mark.parametrize(
    ("call", "value"),
    [
        (lambda: attention(Q[0], K, V), "q of shape (4, 20, 32), k of (1, 2, 20, 32), v of (1, 2, 20, 32)"),
        (lambda: attention(Q, K, V[:, :, :9]), "q of shape (1, 4, 20, 32), k of (1, 2, 20, 32), v of (1, 2, 9, 32)"),
        (lambda: attention(*(torch.zeros(1, 1, 4, 257) for _ in range(3))), "head_dim = 257"),
        (lambda: attention(*(x.double() for x in (Q, K, V))), "q in float64"),
        (lambda: attention(*(x.bfloat16() for x in (Q, K, V))), "triton's interpreter multiplies the bit patterns"),
        (lambda: attention(Q, K.float(), V), "k of shape (1, 2, 20, 32) in float32 on cpu"),
        (lambda: attention(Q.mT.contiguous().mT, K, V), "q with strides (2560, 640, 1, 20)"),
        (lambda: attention(Q, K, V, scale=-1.0), "scale = -1.0"),
        (lambda: attention(Q, K, V, schedule="fast"), "schedule = 'fast'"),
        (lambda: attention(Q, K, V, tile=Tile(48, 32)), "tile 48x32 with block_m = 48"),
        (lambda: attention(Q, K, V, autotune=True), "autotune in the interpreter"),
        (lambda: plan_forward(Q, K, V, operands="pointers", schedule="overlapped"), "schedule = 'overlapped' by pointers"),
        (lambda: plan_forward(Q.float(), K.float(), V.float(), operands="descriptors"), "operands = 'descriptors'"),
        (lambda: plan_forward(Q, K, V, out=Q[:, :2]), "out of shape (1, 2, 20, 32) in float16 on cpu"),
        (lambda: plan_forward(Q, K, V, out=Q.mT.contiguous().mT), "out with strides (2560, 640, 1, 20)"),
        (lambda: plan_backward(Q, K, V, Q, LSE, DO[:, :2]), "grad of shape (1, 2, 20, 32) in float16 on cpu"),
        (lambda: plan_backward(Q, K, V, Q, LSE.double(), DO), "lse of shape (1, 4, 20) in float64 on cpu"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused(call: Callable[[], Any], value: str) -> None:
    with pytest.raises(QuantbenchError) as told:
        call()
    assert (told.value.operation, told.value.value[: len(value)]) == ("attention", value)


@pytest.mark.skipif(ACTIVE, reason="the interpreter plays the GPU")
def test_a_cpu_tensor_needs_the_interpreter() -> None:
    with pytest.raises(UnsupportedError) as told:
        attention(Q, K, V)
    assert told.value.value == "q on cpu"


def test_attention_begins_with_ampere() -> None:
    assert too_old((7, 5)) == "triton compiles no attention for sm_75"
    assert too_old((8, 0)) is None
    with pytest.raises(
        InputError, match=r"^attention: sm_75; expected compute capability 8\.0 or newer$"
    ):
        architecture((7, 5))


@pytest.mark.parametrize(
    ("head_dim", "parts"),
    [(8, (16, 0)), (33, (32, 16)), (48, (32, 16)), (49, (64, 0)), (80, (64, 16)), (96, (64, 32)), (97, (128, 0)),
     (129, (128, 16)), (192, (128, 64)), (193, (256, 0)), (256, (256, 0))],
)  # fmt: skip
def test_parts_of_head_dim(head_dim: int, parts: tuple[int, int]) -> None:
    assert split_head_dim(head_dim) == parts
    assert head_dim <= held_columns(head_dim)


@pytest.mark.parametrize("arch", [80, 86, 89, 90, 100, 120])
@pytest.mark.parametrize(
    "loads", [Loads(2), Loads(4), Loads(8), Loads(16), Loads(16, descriptors=True)], ids=str
)
@pytest.mark.parametrize("fp32", [False, True])
def test_every_head_dim_has_a_menu(arch: int, loads: Loads, fp32: bool) -> None:
    for head_dim in range(8, 257):
        menu = forward_menu(arch, head_dim, loads, fp32=fp32)
        assert menu
        overlapped = [setting for setting in menu if setting.schedule == "overlapped"]
        assert not overlapped or (arch == 90 and loads.descriptors)
        assert len(backward_tiles(arch, head_dim, loads, fp32=fp32)) == 2


@pytest.mark.parametrize(
    ("kv_heads", "seq", "together"),
    [(32, 4096, 12), (8, 4096, 32), (32, 65536, 1), (8, 65536, 4), (32, 128, 32)],
)
def test_heads_that_share_the_l2_cache(kv_heads: int, seq: int, together: int) -> None:
    # k and v of one kv head: 2 · 4096 · 128 · 2 bytes = 2 MiB; 12 of them fill half of 50 MiB.
    work = Attention(1, 32, seq, seq, 128, kv_heads=kv_heads)
    assert heads_side_by_side(Checked(work, 1.0, 8, True), 50 * 2**20) == together


GPU_WORK = [
    Attention(2, 4, 1000, 1000, 128, kv_heads=2),
    Attention(1, 2, 513, 513, 64),
    Attention(1, 2, 1, 1, 128),
    Attention(2, 2, 300, 777, 128, causal=False),
    Attention(1, 8, 512, 512, 256, kv_heads=1),
    *(Attention(1, 2, 257, 257, head_dim) for head_dim in (40, 72, 96, 100, 150, 192, 75)),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("work", GPU_WORK, ids=str)
def test_on_the_gpu(work: Attention, dtype: str) -> None:
    work = replace(work, dtype=dtype)
    check_both_ways(work, operands_of(work, device="cuda", beside=2))


@pytest.mark.gpu
def test_fp32_on_the_gpu() -> None:
    work = Attention(1, 2, 130, 130, 96, dtype="fp32")
    check_both_ways(work, operands_of(work, device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_the_whole_menu_on_the_gpu(head_dim: int, causal: bool) -> None:
    arch = architecture(torch.cuda.get_device_capability())
    work = Attention(1, 3, 700, 700, head_dim, causal=causal)
    operands = operands_of(work, device="cuda")
    for setting in forward_menu(arch, head_dim, Loads(descriptors=arch in WITH_DESCRIPTORS)):
        check_both_ways(work, operands, tile=setting.tile, schedule=setting.schedule)


@pytest.mark.gpu
def test_gradients_are_the_same_each_time() -> None:
    work = Attention(2, 8, 700, 700, 128, kv_heads=2)
    q, k, v, do = operands_of(work, device="cuda")
    forward = plan_forward(q, k, v)
    forward.run()
    runs = []
    for _ in range(3):
        plan = plan_backward(q, k, v, *forward.outputs, do)
        plan.run()
        runs.append(plan.outputs)
    assert all(torch.equal(a, b) for later in runs[1:] for a, b in zip(runs[0], later, strict=True))


@pytest.mark.gpu
def test_autotuning_takes_an_entry_of_the_menu() -> None:
    q, k, v, _ = operands_of(Attention(1, 4, 512, 512, 128), device="cuda")
    arch = architecture(torch.cuda.get_device_capability())
    setting = plan_forward(q, k, v, autotune=True).setting
    assert setting in forward_menu(arch, 128, Loads(descriptors=arch in WITH_DESCRIPTORS))


@pytest.mark.gpu
def test_a_plan_in_a_cuda_graph() -> None:
    work = Attention(1, 4, 512, 512, 128)
    q, k, v, do = operands_of(work, device="cuda")
    forward = plan_forward(q, k, v)
    forward.run()
    plan = plan_backward(q, k, v, *forward.outputs, do)
    assert forward.launch.registers is not None
    assert forward.launch.blocks_per_sm
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        forward.run()
        plan.run()
    side.synchronize()
    expected = [x.clone() for x in (*forward.outputs, *plan.outputs)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        forward.run()
        plan.run()
    poisoned(forward), poisoned(plan)
    graph.replay()
    torch.cuda.synchronize()
    for x, before in zip((*forward.outputs, *plan.outputs), expected, strict=True):
        assert torch.equal(x, before)
