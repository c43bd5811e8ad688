"""Why a product runs below what it could, in words, from the arithmetic of tiles and waves."""

from quantbench.device.spec import DeviceSpec
from quantbench.latency.roofline import assumed_tile
from quantbench.launch import Launch, Tile
from quantbench.quantization import Quantization, cdiv, quantize
from quantbench.units import percent
from quantbench.workload import Attention, Gemm, Workload

# Less than this share lost is not worth a sentence.
_WORTH_SAYING = 0.01


def idle_reasons(
    workload: Workload, spec: DeviceSpec, launch: Launch | None = None, *, assume: bool = True
) -> tuple[str, ...]:
    """Sentences on padding, the last wave and misaligned rows; the worst first. Empty when nothing is lost.

    The tile is that of the launch where it is known, else the one assumed for the device, and then it says so; with
    assume = False nothing that needs a tile is said without one.
    """
    if isinstance(workload, Attention):
        return _attention_reasons(workload)
    if not isinstance(workload, Gemm):
        return ()
    tile, q = _quantized(workload, spec, launch)
    found: list[tuple[float, str]] = []
    for name, size, block in (("m", workload.m, tile.block_m), ("n", workload.n, tile.block_n)):
        padded = cdiv(size, block) * block
        found.append((1 - size / padded, f"{name} = {size} pads to {padded}"))
    if spec.kind == "cuda":  # one core has no waves
        full = q.last_wave_tiles / q.resident_blocks
        found.append((1 - q.wave_efficiency, f"wave {q.num_waves} of {q.num_waves} is {percent(full)} full"))
    told = launch is not None and launch.tile is not None
    if not told and not assume:
        found = []
    by = "" if told else f" ({tile} assumed)"
    said = [f"{text}: {percent(idle)} idle{by}" for idle, text in sorted(found, reverse=True) if idle >= _WORTH_SAYING]
    if q.alignment_bytes < 16:
        said.append(f"rows are aligned to {q.alignment_bytes} bytes, not 16")
    return tuple(said)


def _quantized(workload: Gemm, spec: DeviceSpec, launch: Launch | None) -> tuple[Tile, Quantization]:
    assumed = assumed_tile(spec)
    tile, per_sm = assumed.tile, assumed.blocks_per_sm
    if launch is not None and launch.tile is not None:
        tile, per_sm = launch.tile, launch.blocks_per_sm or 1
    return tile, quantize(workload, tile, spec.sm_count, per_sm)


def _attention_reasons(work: Attention) -> tuple[str, ...]:
    # Loads of 16 bytes need head_dim to be a multiple of 8 in fp16 and bf16.
    return (f"head_dim = {work.head_dim} is not a multiple of 8",) if work.head_dim % 8 else ()
