"""The triton providers: what they refuse and in which words, and that they keep to the provider's
seam.
"""

from __future__ import annotations

import pytest
from interpreter import ACTIVE, in_interpreter
from quantbench.kernels.launching import TRITON

from quantbench.device import lookup
from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError, MeasurementError
from quantbench.launch import Tile
from quantbench.providers import catalog, triton_kernels
from quantbench.providers.audit import check
from quantbench.workload import Attention, Gemm, GroupedGemm, Softmax, Workload

SCHEDULES = ("triton.data_parallel", "triton.split_k", "triton.stream_k", "triton.persistent")
GROUPED = ("triton.grouped", "triton.grouped_persistent")
IDS = (*SCHEDULES, *GROUPED, "triton.fused", "triton.flash")
CPU = DeviceSpec(
    name="cpu-test", kind="cpu", sm_count=1, sm_clock_mhz=3000, l2_bytes=2**20, smem_per_sm_bytes=0,
    memory_bytes=2**33, memory_gb_per_s=20, peak_tflops={"fp32": 0.1},
)  # fmt: skip
AMD = lookup("mi300x-192gb")
H200, A100, V100 = lookup("h200-sxm-141gb"), lookup("a100-sxm4-80gb"), lookup("v100-sxm2-16gb")
NO_GPU = "needs a CUDA GPU, or TRITON_INTERPRET=1 set to run in triton's interpreter"
not_interpreted = pytest.mark.skipif(ACTIVE, reason="the interpreter plays the GPU")


@pytest.mark.parametrize("provider_id", IDS)
def test_the_catalog_makes_them(provider_id: str) -> None:
    assert catalog.make(provider_id).id == provider_id


@pytest.mark.parametrize(
    "provider_id", [*(f"{name}@64x32" for name in IDS), "triton.split_k@64x32x16-split2"]
)
def test_a_tile_behind_the_name_is_the_kernels(provider_id: str) -> None:
    (known,) = catalog.expand([provider_id])
    provider = catalog.make(known)
    assert provider.id == provider_id
    assert vars(provider)["tile"] == Tile.parse(provider_id.partition("@")[2])
    assert [catalog.runs_kind(provider_id, kind) for kind in ("gemm", "attention")] == [
        catalog.runs_kind(provider_id.partition("@")[0], kind) for kind in ("gemm", "attention")
    ]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("torch.mm@64x32", "'torch.mm@64x32'; expected a tile for one of our kernels"),
        ("triton@64x32", "'triton@64x32'; expected a tile for one of our kernels"),
        ("triton.fast@64x32", "'triton.fast@64x32'; expected package.module:Class or one of torch"),
        (
            "triton.flash@64x64x32",
            "'triton.flash@64x64x32'; expected a tile without block_k and parts",
        ),
        (
            "triton.fused@4x64-split2",
            "'triton.fused@4x64-split2'; expected a tile without block_k and parts",
        ),
        ("triton.persistent@64", "Tile: '64'; expected 128x256, 128x256x64 or"),
        (
            "triton.persistent@64x32-warps4-stages2",
            "'64x32-warps4-stages2'; expected 128x256, 128x256x64 or",
        ),
        ("triton.persistent@64x", "Tile: '64x'; expected"),
        ("triton.persistent@0x64", "block_m = 0; expected an integer from 1"),
        ("triton.persistent@64x64x0", "block_k = 0; expected an integer from 1"),
        ("triton.split_k@64x64-split0", "split_k = 0; expected an integer from 1"),
    ],
)
def test_tiles_that_are_none_are_refused(name: str, words: str) -> None:
    with pytest.raises(InputError) as error:
        catalog.expand([name])
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("name", "words"), [("torch.nm", "'torch.nm'; expected"), ("triton", "one of triton.data_par")]
)
def test_a_name_that_is_no_provider_makes_none(name: str, words: str) -> None:
    with pytest.raises(InputError) as error:
        catalog.make(name)
    assert words in str(error.value)


@in_interpreter
@pytest.mark.parametrize(
    "schedule", ["triton.data_parallel@32x64x16", "triton.split_k@32x32x16-split3"]
)
def test_a_product_with_a_tile_of_its_own_passes_the_check(schedule: str) -> None:
    passes(schedule, Gemm(33, 40, 48, 1, "fp32", "nt"))


@not_interpreted
@pytest.mark.parametrize(
    ("provider_id", "workload", "device", "reason"),
    [
        ("triton.split_k", Gemm(64, 64, 64), H200, None),
        ("triton.split_k", Gemm(64, 64, 64, dtype="fp8"), A100, "fp8 needs compute capability 8.9, not 8.0"),
        ("triton.split_k", Gemm(64, 64, 64, dtype="int8"), A100, "triton.split_k does not take int8"),
        ("triton.split_k", Gemm(64, 64, 64), CPU, f"triton.split_k {NO_GPU}"),
        ("triton.split_k", Softmax(2, 16, 16), H200, "triton.split_k runs matrix products, not softmax"),
        ("triton.grouped", GroupedGemm((8, 0), 64, 64, "int8"), A100, "triton.grouped does not take int8"),
        ("triton.flash", Attention(1, 2, 8, 8, 75, direction="backward"), H200, None),
        ("triton.flash", Attention(1, 2, 8, 8, 64, dtype="fp32"), A100, None),
        ("triton.flash", Attention(1, 2, 8, 8, 512), H200, "triton.flash takes head_dim from 8 to 256, not 512"),
        ("triton.flash", Attention(1, 2, 8, 8, 64, dtype="fp16"), V100, "triton compiles no attention for sm_70"),
        ("triton.fused", Softmax(2, 8, 8, direction="backward"), H200, None),
        ("triton.fused", Softmax(2, 8, 16384, mask="full"), H200, None),
        ("triton.fused", Softmax(2, 8, 16385, mask="full"), H200,
         "triton.fused takes rows of up to 16384 columns, not 16385"),
        ("triton.fused", Softmax(2, 8, 8), AMD, f"triton.fused {NO_GPU}"),
    ],
)  # fmt: skip
def test_what_is_refused(
    provider_id: str, workload: Workload, device: DeviceSpec, reason: str | None
) -> None:
    if reason is None and TRITON < (3, 6):
        pytest.skip("triton 3.2 serves V100 and T4 alone")
    assert catalog.make(provider_id).unsupported(workload, device) == reason


@not_interpreted
@pytest.mark.skipif(TRITON < (3, 3), reason="this triton still serves V100")
@pytest.mark.parametrize(
    ("provider_id", "work"),
    [
        ("triton.data_parallel", Gemm(64, 64, 64, dtype="fp16")),
        ("triton.fused", Softmax(2, 8, 8, dtype="fp16")),
    ],
)
def test_v100_is_told_which_versions_to_install(provider_id: str, work: Workload) -> None:
    assert catalog.make(provider_id).unsupported(work, V100) == (
        f"our kernels do not run on sm_70 with triton {TRITON[0]}.{TRITON[1]}; it needs triton 3.2 (torch 2.6)"
    )


def passes(provider_id: str, work: Workload) -> None:
    """In the interpreter, where nothing is launched."""
    provider = catalog.make(provider_id)
    assert provider.unsupported(work, CPU) is None
    check(provider, work, CPU)
    assert provider.prepare(work, CPU).launch() is None


@in_interpreter
@pytest.mark.slow
@pytest.mark.parametrize("provider_id", SCHEDULES)
@pytest.mark.parametrize(
    "gemm", [Gemm(70, 40, 50, dtype="fp16"), Gemm(33, 40, 48, 2, "fp32", "nt")], ids=str
)
def test_products_pass_the_check_before_timing(provider_id: str, gemm: Gemm) -> None:
    passes(provider_id, gemm)


@in_interpreter
@pytest.mark.parametrize("provider_id", GROUPED)
@pytest.mark.parametrize("layout", ["nt", "tn"])
def test_grouped_products_pass_the_check_before_timing(provider_id: str, layout: str) -> None:
    passes(provider_id, GroupedGemm((70, 0, 3, 33), 40, 48, "fp16", layout))


@in_interpreter
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(("seq_q", "seq_k", "causal"), [(65, 65, True), (33, 50, False)])
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_attention_passes_the_check_before_timing(
    dtype: str, seq_q: int, seq_k: int, causal: bool, direction: str
) -> None:
    passes(
        "triton.flash",
        Attention(
            1, 4, seq_q, seq_k, 40, kv_heads=2, dtype=dtype, causal=causal, direction=direction
        ),
    )


@in_interpreter
@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    ("rows", "cols", "mask"), [(33, 33, "causal"), (9, 65, "full"), (9, 65, "none")]
)
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_softmax_passes_the_check_before_timing(
    dtype: str, rows: int, cols: int, mask: str, direction: str
) -> None:
    passes(
        "triton.fused",
        Softmax(
            6, rows, cols, dtype=dtype, mask=mask, scale=0.125, mask_batch=2, direction=direction
        ),
    )


@in_interpreter
def test_the_check_sees_a_lost_reduction_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """k is told as half of what it is."""
    from quantbench.kernels.gemm import host as gemm

    sizes = gemm.sizes
    monkeypatch.setattr(
        gemm, "sizes", lambda operands: {**sizes(operands), "k": operands.gemm.k // 2}
    )
    with pytest.raises(MeasurementError, match="relative error"):
        check(catalog.make("triton.data_parallel@32x32x16"), Gemm(40, 40, 64, dtype="fp16"), CPU)


@in_interpreter
def test_the_check_sees_keys_that_end_one_row_early(monkeypatch: pytest.MonkeyPatch) -> None:
    from quantbench.kernels.attention import host as attention

    arguments = attention.arguments

    def shorter(*given: object) -> dict[str, object]:
        made = arguments(*given)  # type: ignore[arg-type]
        return {**made, "seq_k": made["seq_k"] - 1}

    monkeypatch.setattr(attention, "arguments", shorter)
    with pytest.raises(MeasurementError, match="relative error"):
        check(
            catalog.make("triton.flash"),
            Attention(1, 2, 20, 33, 32, dtype="fp16", causal=False),
            CPU,
        )


@in_interpreter
def test_the_check_sees_a_diagonal_one_column_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads are told to have one row more than they have."""
    from quantbench.kernels import softmax

    shared = softmax._shared_arguments
    monkeypatch.setattr(
        softmax,
        "_shared_arguments",
        lambda x, mask, tile: {**shared(x, mask, tile), "rows_per_head": x.shape[-2] + 1},
    )
    with pytest.raises(MeasurementError, match=r"relative error|not written"):
        check(catalog.make("triton.fused"), Softmax(4, 16, 16, dtype="fp16"), CPU)


@in_interpreter
@pytest.mark.parametrize(
    ("provider_id", "work", "reason"),
    [
        (
            "triton.data_parallel",
            Gemm(64, 64, 64),
            "triton's interpreter multiplies the bit patterns of bf16",
        ),
        (
            "triton.flash",
            Attention(1, 2, 8, 8, 64),
            "triton's interpreter multiplies the bit patterns of bf16",
        ),
        ("triton.fused", Softmax(2, 8, 8), "triton's interpreter truncates to bf16"),
    ],
)
def test_bf16_is_refused_in_the_interpreter(provider_id: str, work: Workload, reason: str) -> None:
    assert catalog.make(provider_id).unsupported(work, CPU) == reason


@in_interpreter
@pytest.mark.parametrize(
    ("kind", "grid"), [("gemm", (6, 1, 1)), ("attention", (4, 1, 1)), ("softmax", (80, 1, 1))]
)
def test_a_users_tile_is_used(
    kind: str, grid: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_kernels, "INTERPRETER", False)  # so that the task tells its launch
    provider_id, work = {
        "gemm": ("triton.data_parallel@16x32", Gemm(40, 40, 40, dtype="fp16")),
        "attention": ("triton.flash@32x32", Attention(1, 2, 40, 40, 32, dtype="fp16")),
        "softmax": ("triton.fused@2x64", Softmax(4, 40, 40, dtype="fp16")),
    }[kind]
    launch = catalog.make(provider_id).prepare(work, CPU).launch()
    assert launch.grid == grid
