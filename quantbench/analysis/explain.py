"""Why a product runs below what it could, in words, from the arithmetic of tiles and waves."""

from quantbench.analysis.blocks import TileInUse
from quantbench.device.spec import DeviceSpec
from quantbench.quantization import gemm_alignment_bytes, idle_shares
from quantbench.units import percent
from quantbench.workload import Attention, Gemm, Workload

# Less than this share lost is not worth a sentence.
_WORTH_SAYING = 0.01


def idle_reasons(
    workload: Workload, spec: DeviceSpec, used: TileInUse | None, peak_share: float | None
) -> tuple[str, ...]:
    """Sentences on padding, the last wave and misaligned rows; the worst first. Empty when nothing is lost.

    used: the tile that computes it; without one, nothing is said of tiles. peak_share: the rate, measured or predicted,
    as a share of peak (None: not known); nothing is said to be idle that contradicts it.
    """
    if isinstance(workload, Attention):
        return _attention_reasons(workload)
    if not isinstance(workload, Gemm):
        return ()
    said = []
    if used is not None:
        by = f" ({used.tile} assumed)" if used.source == "assumed" else ""
        for idle in idle_shares(workload, used.tile, spec.sm_count, used.blocks_per_sm, peak_share):
            if idle.share >= _WORTH_SAYING:
                said.append(f"{idle.words}: {percent(idle.share)} idle{by}")
    aligned = gemm_alignment_bytes(workload)
    if aligned < 16:
        said.append(f"rows are aligned to {aligned} bytes, not 16")
    return tuple(said)


def _attention_reasons(work: Attention) -> tuple[str, ...]:
    # Loads of 16 bytes need head_dim to be a multiple of 8 in fp16 and bf16.
    return (f"head_dim = {work.head_dim} is not a multiple of 8",) if work.head_dim % 8 else ()
