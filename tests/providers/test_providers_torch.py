"""torch's providers on the CPU against their references, what they refuse, and how they run."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from made_devices import CPU
from references import relative_error, results
from torch.utils._python_dispatch import TorchDispatchMode

from quantbench.device.spec import DeviceSpec
from quantbench.errors import MeasurementError
from quantbench.providers import catalog, torch_attention
from quantbench.providers.correctness import tolerance
from quantbench.providers.inputs import Inputs
from quantbench.providers.tasks import BackwardTask, ForwardTask
from quantbench.providers.torch_attention import choose_heads, megatron_fallback
from quantbench.providers.torch_gemm import with_tf32
from quantbench.providers.torch_moe import TorchGroupedMm
from quantbench.workload import Attention, Gemm, GroupedGemm, Permute, Softmax, Workload


def cuda(major: int, minor: int) -> DeviceSpec:
    return DeviceSpec(
        name="some-gpu", kind="cuda", sm_count=108, sm_clock_mhz=1410, l2_bytes=40 * 2**20,
        smem_per_sm_bytes=164 * 1024, memory_bytes=80 * 2**30, memory_gb_per_s=2039, peak_tflops={"bf16": 312},
        compute_capability=(major, minor),
    )  # fmt: skip


V100, A100, L40S, H100 = cuda(7, 0), cuda(8, 0), cuda(8, 9), cuda(9, 0)
# gfx942, whose 9.4 is no compute capability
MI300X = dataclasses.replace(cuda(9, 4), kind="rocm")

GEMMS = [
    Gemm(m, n, k, batch=batch, dtype=dtype, layout=layout)
    for m, n, k, batch in [(67, 131, 97, 1), (1, 33, 65, 1), (17, 8, 24, 3)]
    for dtype in ("fp16", "bf16", "fp32")
    for layout in ("nn", "nt", "tn")
]
SOFTMAXES = [
    Softmax(6, rows, cols, dtype=dtype, mask=mask, scale=scale, mask_batch=2, direction=direction)
    for rows, cols, mask in [(33, 33, "causal"), (9, 65, "full"), (9, 65, "none")]
    for dtype in ("fp16", "bf16", "fp32")
    for direction in ("forward", "backward")
    for scale in (0.125,)
]
ATTENTIONS = [
    Attention(
        2, 4, seq_q, seq_k, 40, kv_heads=kv_heads, dtype=dtype, causal=causal, direction=direction
    )
    for seq_q, seq_k, causal in [(65, 65, True), (33, 50, False)]
    for kv_heads in (4, 2)
    for dtype in ("fp16", "bf16", "fp32")
    for direction in ("forward", "backward")
]
CASES: list[tuple[str, Workload]] = [
    *(("torch.mm", work) for work in GEMMS),
    *(("torch.mm", Gemm(17, 24, 40, dtype="int8", layout=layout)) for layout in ("nn", "nt", "tn")),
    *(
        ("torch.grouped_loop", GroupedGemm(rows, 24, 40, dtype, layout))
        for rows in [(33, 0, 1, 17), (0, 50, 0)]
        for dtype in ("fp16", "bf16", "fp32")
        for layout in ("nn", "nt", "tn")
    ),
    *(
        ("torch.permute", Permute(17, 40, 3, dtype, direction))
        for dtype in ("fp16", "bf16", "fp32")
        for direction in ("permute", "unpermute")
    ),
    *(("torch.eager", work) for work in SOFTMAXES),
    *((provider, work) for provider in ("torch.flash", "torch.math") for work in ATTENTIONS),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("provider_id", "work"), CASES, ids=[f"{provider}-{work}" for provider, work in CASES]
)
def test_results_are_within_half_the_tolerance(provider_id: str, work: Workload) -> None:
    provider = catalog.make(provider_id)
    assert provider.unsupported(work, CPU) is None
    task = provider.prepare(work, CPU, seed=5)
    task.run()
    task.run()
    assert task.launch() is None
    outputs, references = task.outputs(), results(work, task.inputs())
    assert len(outputs) == len(references) >= 1
    for output, reference in zip(outputs, references, strict=True):
        assert output.shape == reference.shape
        assert reference.dtype == torch.float64
        assert relative_error(output, reference) <= tolerance(work).relative_norm / 2


@pytest.mark.parametrize(
    "work", [Gemm(9, 17, 33), Gemm(9, 17, 33, batch=2), Gemm(17, 8, 16, dtype="int8")]
)
def test_a_product_writes_into_one_tensor(work: Gemm) -> None:
    task = catalog.make("torch.mm").prepare(work, CPU)
    (before,) = task.outputs()
    before.zero_()
    task.run()
    (after,) = task.outputs()
    assert after.data_ptr() == before.data_ptr()
    assert after.any()


@pytest.mark.skipif(
    not torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm.out", "CPU"),
    reason="this torch has no fp8 product on a CPU",
)
def test_fp8_operands_count_as_they_are_stored() -> None:
    """The fp8 task needs a GPU to be offered, and torch's CPU build can run it."""
    work = Gemm(32, 48, 64, dtype="fp8", layout="nt")
    provider = catalog.make("torch.mm")
    task = provider.prepare(work, CPU, seed=1)
    task.run()
    (output,), (reference,) = task.outputs(), results(work, task.inputs())
    assert output.dtype == torch.bfloat16
    assert relative_error(output, reference) <= tolerance(work).relative_norm
    assert torch.equal(reference, task.inputs()[0].double() @ task.inputs()[1].double())


fp8 = partial(Gemm, dtype="fp8", layout="nt")
int8 = partial(Gemm, dtype="int8")
grouped = partial(GroupedGemm, (8, 0), 16)


@pytest.mark.parametrize(
    ("provider_id", "work", "device", "reason"),
    [
        ("torch.mm", Softmax(1, 8, 8), CPU, "torch.mm runs matrix products, not softmax"),
        ("torch.mm", Gemm(8, 8, 8, dtype="tf32"), CPU, "tf32 products need a CUDA device"),
        ("torch.mm", fp8(16, 16, 16), MI300X, "fp8 products need a CUDA device"),
        ("torch.mm", Gemm(8, 8, 8), V100, "bf16 needs compute capability 8.0, not 7.0"),
        ("torch.mm", int8(32, 8, 8), V100,
         "int8 needs compute capability 7.5, not 7.0"),
        ("torch.mm", fp8(32, 16, 16), A100,
         "fp8 needs compute capability 8.9, not 8.0"),
        ("torch.mm", Gemm(32, 16, 16, dtype="fp8"), H100,
         "torch._scaled_mm needs a row-major and b column-major, layout nt, not nn"),
        ("torch.mm", fp8(32, 24, 16), H100,
         "torch._scaled_mm needs n and k divisible by 16 on CUDA, not n = 24, k = 16"),
        ("torch.mm", fp8(32, 16, 16, batch=2), H100,
         "torch._scaled_mm takes single products, and this is a batch of 2"),
        ("torch.mm", int8(16, 16, 16), H100,
         "torch._int_mm needs more than 16 rows on CUDA, not m = 16"),
        ("torch.mm", int8(32, 12, 16), H100,
         "torch._int_mm needs n and k divisible by 8 on CUDA, not n = 12, k = 16"),
        ("torch.mm", int8(32, 16, 16, batch=2), CPU,
         "torch._int_mm takes single products, and this is a batch of 2"),
        ("torch.grouped_loop", grouped(16, "fp8"), H100,
         "torch._scaled_mm needs a row-major and b column-major, layout nt, not nn"),
        ("torch.grouped_mm", grouped(16), CPU,
         "torch.grouped_mm is a loop of products on a CPU, as torch.grouped_loop is"),
        ("torch.grouped_mm", grouped(16, "fp16"), H100, "torch.grouped_mm takes bf16, not fp16"),
        ("torch.grouped_mm", grouped(16), A100,
         "torch.grouped_mm has kernels for compute capabilities 9.x and 10.x; on 8.0 it is a loop of products that "
         "waits for the host, as torch.grouped_loop is without the wait"),
        ("torch.grouped_mm", grouped(20), H100,
         "torch.grouped_mm needs n and k divisible by 8, not n = 16, k = 20"),
        ("torch.grouped_mm", GroupedGemm((8, 3), 16, 16, layout="tn"), H100,
         "torch.grouped_mm needs rows of each expert divisible by 8 to reduce over them"),
        ("torch.cudnn", Attention(1, 2, 8, 8, 8), CPU, "torch.cudnn needs a CUDA device"),
    ],
)  # fmt: skip
def test_refusals(provider_id: str, work: Workload, device: DeviceSpec, reason: str) -> None:
    if provider_id == "torch.grouped_mm" and not hasattr(torch, "_grouped_mm"):
        reason = f"torch {torch.__version__} has neither torch.nn.functional.grouped_mm nor torch._grouped_mm"
    assert catalog.make(provider_id).unsupported(work, device) == reason


@pytest.mark.skipif(not hasattr(torch, "_grouped_mm"), reason="this torch has no grouped product")
@pytest.mark.parametrize("layout", ["nn", "nt", "tn"])
def test_torchs_grouped_product_is_called_as_it_wants(layout: str) -> None:
    """On a CPU, where it is a loop that nobody times."""
    work = GroupedGemm((32, 0, 8, 16), 24, 40, layout=layout)
    task = TorchGroupedMm("torch.grouped_mm").task(work, CPU, Inputs(CPU))
    task.run()
    assert (
        relative_error(task.outputs()[0], results(work, task.inputs())[0])
        <= tolerance(work).relative_norm
    )


@pytest.mark.parametrize(
    ("work", "device"),
    [
        (Gemm(8, 8, 8, dtype="fp16"), V100),
        (Gemm(8, 8, 8, dtype="fp32"), V100),
        (Gemm(8, 8, 8, dtype="tf32"), A100),
        (Gemm(17, 8, 8, dtype="int8", layout="tn"), A100),
        (Gemm(1, 16, 16, dtype="fp8", layout="nt"), L40S),
    ],
)
def test_what_a_gpu_takes(work: Gemm, device: DeviceSpec) -> None:
    assert catalog.make("torch.mm").unsupported(work, device) is None


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize("set_before", [True, False])
def test_tf32_is_set_for_the_call_alone(wanted: bool, set_before: bool) -> None:
    matmul = torch.backends.cuda.matmul
    seen: list[bool] = []

    def call() -> None:
        seen.append(matmul.allow_tf32)
        raise KeyboardInterrupt

    initial = matmul.allow_tf32
    matmul.allow_tf32 = set_before
    try:
        with pytest.raises(KeyboardInterrupt):
            with_tf32(call, wanted)()
        assert (seen, matmul.allow_tf32) == ([wanted], set_before)
    finally:
        matmul.allow_tf32 = initial


class Operations(TorchDispatchMode):
    """Writes down which operations run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "masked", "operations"),
    [
        (torch.bfloat16, True, ["_to_copy", "mul", "masked_fill_", "_softmax", "_to_copy"]),
        (torch.float16, False, ["_to_copy", "mul", "_softmax", "_to_copy"]),
        (torch.float32, True, ["mul", "masked_fill_", "_softmax"]),
    ],
)
def test_eager_softmax_is_megatrons_sequence(
    dtype: torch.dtype, masked: bool, operations: list[str]
) -> None:
    x = torch.randn(2, 3, 4, 4, dtype=dtype)
    before = x.clone()
    dropped = torch.ones(4, 4, dtype=torch.bool).triu(1) if masked else None
    with Operations() as seen:
        y = megatron_fallback(x, 0.5, dropped)
    assert seen.names == operations
    assert y.dtype == dtype
    assert torch.equal(x, before)


def test_a_wholly_masked_row_is_uniform_as_in_megatron() -> None:
    y = megatron_fallback(torch.randn(1, 4), 1.0, torch.ones(1, 4, dtype=torch.bool))
    assert y.tolist() == [[0.25, 0.25, 0.25, 0.25]]


@pytest.mark.parametrize(
    ("provider_id", "enabled"),
    [
        ("torch.flash", {"flash"}),
        ("torch.math", {"math"}),
        ("torch.cudnn", {"cudnn"}),
        ("torch.efficient", {"mem_efficient"}),
    ],
)
def test_exactly_one_backend_is_enabled_while_it_runs(
    provider_id: str, enabled: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[set[str]] = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        names = ("flash", "math", "cudnn", "mem_efficient")
        seen.append(
            {name for name in names if getattr(torch.backends.cuda, f"{name}_sdp_enabled")()}
        )
        assert options == {"is_causal": True, "enable_gqa": True}
        return q

    monkeypatch.setattr(torch_attention, "_cpu_flash_takes_groups", lambda: True)
    monkeypatch.setattr(torch_attention, "scaled_dot_product_attention", attend)
    task = catalog.make(provider_id).prepare(Attention(1, 4, 8, 8, 16, kv_heads=2), CPU)
    task.run()
    assert seen == [enabled]


class Answers:
    """A stand-in for torch's test of a backend: takes workloads as `accepts` says, and says why
    not.
    """

    def __init__(self, accepts: Callable[[Any], bool], *messages: str) -> None:
        self.accepts = accepts
        self.messages = messages
        self.asked: list[tuple[tuple[int, ...], tuple[int, ...], bool, bool]] = []

    def __call__(self, params: Any, debug: bool) -> bool:
        self.asked.append(
            (
                tuple(params.query.shape),
                tuple(params.key.shape),
                params.enable_gqa,
                params.query.requires_grad,
            )
        )
        if self.accepts(params):
            return True
        for message in self.messages if debug else ():
            warnings.warn(message, UserWarning, stacklevel=1)
        return False


GROUPED = Attention(4, 32, 128, 128, 64, kv_heads=8)


def test_a_backend_is_asked_about_one_group_of_one_sample() -> None:
    answers = Answers(lambda params: True)
    heads = choose_heads("torch.flash", answers, GROUPED, torch.device("cpu"))
    assert heads == (False, None)
    assert answers.asked == [((1, 4, 128, 64), (1, 1, 128, 64), True, False)]


def test_grouped_heads_are_repeated_for_a_backend_that_needs_equal_ones() -> None:
    answers = Answers(
        lambda params: not params.enable_gqa, "key and value heads must equal query heads"
    )
    work = Attention(4, 32, 128, 128, 64, kv_heads=8, direction="backward")
    heads = choose_heads("torch.efficient", answers, work, torch.device("cpu"))
    assert heads == (True, None)
    assert answers.asked == [
        ((1, 4, 128, 64), (1, 1, 128, 64), True, True),
        ((1, 1, 128, 64), (1, 1, 128, 64), False, True),
    ]


def test_a_refusal_is_one_sentence_in_torchs_words() -> None:
    answers = Answers(
        lambda params: False,
        "Head dim\n must be <= 256. (Triggered internally at sdp.cpp:1)",
        "Not fp32.",
    )
    heads = choose_heads("torch.flash", answers, Attention(2, 8, 16, 16, 512), torch.device("cpu"))
    assert heads[1] == (
        "torch.flash does not take attention 2×8×16×16×512 bf16 causal forward: Head dim must be <= 256; Not fp32"
    )


def test_a_refusal_without_words() -> None:
    heads = choose_heads(
        "torch.flash",
        Answers(lambda params: False),
        Attention(2, 8, 16, 16, 64),
        torch.device("cpu"),
    )
    assert heads[1] == (
        "torch.flash does not take attention 2×8×16×16×64 bf16 causal forward: torch does not say why"
    )


@pytest.mark.parametrize("variant", ["flash", "cudnn", "efficient"])
def test_torchs_own_tests_are_called_as_they_want(variant: str) -> None:
    # On CPU tensors every CUDA backend says no, whatever its version; what counts is that the call
    # is understood.
    if variant == "cudnn" and torch.version.cuda and not torch.cuda.is_available():
        pytest.skip("torch's CUDA build asks the driver for cuDNN, and there is none")
    heads = choose_heads("x", torch_attention.BACKENDS[variant][1], GROUPED, torch.device("cpu"))
    assert heads[1] is not None


def test_a_cpu_kernel_that_takes_no_groups_gets_repeated_heads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options: Any) -> torch.Tensor:
        if options.get("enable_gqa"):
            raise RuntimeError("No available kernel. Aborting execution.")  # as torch 2.6 says
        assert k.shape[1] == v.shape[1] == q.shape[1]
        return q

    monkeypatch.setattr(torch_attention, "scaled_dot_product_attention", attend)
    torch_attention._cpu_flash_takes_groups.cache_clear()
    try:
        catalog.make("torch.flash").prepare(Attention(1, 4, 8, 8, 16, kv_heads=2), CPU).run()
    finally:
        torch_attention._cpu_flash_takes_groups.cache_clear()


def test_grouped_heads_repeated_in_every_run_give_the_same_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    provider = catalog.make("torch.math")
    work = Attention(2, 4, 33, 33, 16, kv_heads=2, dtype="fp32", direction="backward")
    monkeypatch.setattr(type(provider), "_heads", lambda self, work, device: (True, None))
    task = provider.prepare(work, CPU, seed=2)
    task.run()
    for output, reference in zip(task.outputs(), results(work, task.inputs()), strict=True):
        assert relative_error(output, reference) < 1e-5


def test_forward_keeps_no_graph_and_lets_go_of_the_last_result() -> None:
    weight = torch.randn(4, 4, requires_grad=True)
    alive: list[int] = []
    task = ForwardTask(lambda: (alive.append(len(task.outputs())), weight @ weight)[1], (weight,))
    task.run()
    task.run()
    assert alive == [0, 0]
    assert not task.outputs()[0].requires_grad


def test_backward_runs_its_forward_once() -> None:
    forwards: list[int] = []
    x, gradient = torch.randn(3, 4), torch.randn(3, 4)

    def forward() -> torch.Tensor:
        forwards.append(1)
        return x * x

    task = BackwardTask(forward, (x,), gradient)
    assert task.outputs() == ()
    for _ in range(3):
        task.run()
    assert forwards == [1]
    assert relative_error(task.outputs()[0], 2 * x.detach().double() * gradient.double()) < 1e-6


class CudaLike:
    """As much of a CUDA tensor as BackwardTask asks about."""

    is_cuda = True


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A current stream that can be changed, on a machine that has none."""

    class Current:
        cuda_stream = 1
        capturing = False

    current = Current()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current.capturing)
    monkeypatch.setattr(torch.autograd, "grad", lambda *args, **options: args)
    return current


def test_backward_follows_its_stream(stream: Any) -> None:
    forwards: list[int] = []

    def forward() -> str:
        forwards.append(stream.cuda_stream)
        return f"saved on {stream.cuda_stream}"

    task = BackwardTask(forward, (), CudaLike())  # type: ignore[arg-type]
    task.run()
    assert forwards == [1]
    stream.cuda_stream = 2
    task.run()
    stream.capturing = True
    task.run()
    stream.cuda_stream, stream.capturing = 1, False
    task.run()
    assert forwards == [1, 2]
    assert task.outputs()[0] == "saved on 1"


def test_backward_cannot_be_captured_on_a_new_stream(stream: Any) -> None:
    task = BackwardTask(lambda: None, (), CudaLike())  # type: ignore[arg-type]
    stream.cuda_stream, stream.capturing = 2, True
    with pytest.raises(
        MeasurementError,
        match=r"^backward: captured on a stream that it has not run on; expected one run on that stream before$",
    ):
        task.run()


GPU_CASES: list[tuple[str, Workload]] = [
    *(("torch.mm", Gemm(1000, 520, 776, dtype=dtype, layout=layout))
      for dtype in ("fp16", "bf16", "fp32", "tf32") for layout in ("nn", "nt", "tn")),
    *(("torch.mm", Gemm(1000, 528, 784, dtype=d, layout="nt")) for d in ("fp8", "int8")),
    ("torch.mm", Gemm(130, 67, 99, batch=5, dtype="bf16", layout="nt")),
    *((f"torch.{name}", Attention(2, 8, 300, 300, 64, kv_heads=kv, dtype="bf16", direction=direction))
      for name in ("flash", "cudnn", "efficient", "math") for kv in (8, 2) for direction in ("forward", "backward")),
    *(("torch.eager", Softmax(8, 300, 300, mask=mask, mask_batch=2, direction=direction))
      for mask in ("causal", "full", "none") for direction in ("forward", "backward")),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize(("provider_id", "work"), GPU_CASES, ids=[f"{p}-{w}" for p, w in GPU_CASES])
def test_on_a_gpu_eager_and_captured(provider_id: str, work: Workload) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    from quantbench import device
    from quantbench.providers import correctness

    spec = device.current()
    provider = catalog.make(provider_id)
    reason = provider.unsupported(work, spec)
    if reason is not None:
        pytest.skip(reason)
    task = provider.prepare(work, spec, seed=1)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        task.run()
        task.run()
    torch.cuda.synchronize()
    generator = torch.Generator("cuda").manual_seed(1)
    correctness.check(provider_id, work, task.inputs(), task.outputs(), generator)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        task.run()
    for output in task.outputs():
        output.fill_(torch.nan if output.dtype.is_floating_point else -1)
    graph.replay()
    torch.cuda.synchronize()
    correctness.check(f"{provider_id} captured", work, task.inputs(), task.outputs(), generator)
