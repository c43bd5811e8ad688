"""Why a product runs below what it could, from the arithmetic of tiles and waves."""

from dataclasses import dataclass

from quantbench.analysis.blocks import TileInUse
from quantbench.device.spec import DeviceSpec
from quantbench.quantization import alignment_words, gemm_alignment_bytes, idle_shares
from quantbench.units import percent
from quantbench.workload import Attention, Gemm, Workload

# Less than this share lost is not worth a sentence.
_WORTH_SAYING = 0.01


@dataclass(frozen=True)
class IdleReason:
    """A reason why a workload runs below the peak. kind: as of `quantization.IdleShare`, or `alignment`.

    words: for people, with the share of time that is idle where it is known.
    """

    kind: str
    words: str


def idle_reasons(
    workload: Workload, spec: DeviceSpec, used: TileInUse | None, peak_share: float | None
) -> tuple[IdleReason, ...]:
    """Padding, the last wave and misaligned rows, the largest share first. Empty when nothing is lost.

    used: the tile that computes the workload; without one, tiles and waves give no reason.
    peak_share: the measured or predicted rate as a share of peak, None where it is not known. Shares that contradict
    it are left out.
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
                said.append(IdleReason(idle.kind, f"{idle.words}: {percent(idle.share)} idle{by}"))
    aligned = gemm_alignment_bytes(workload)
    if aligned < 16:
        said.append(IdleReason("alignment", alignment_words(aligned, verb="are")))
    return tuple(said)


def _attention_reasons(work: Attention) -> tuple[IdleReason, ...]:
    # Loads of 16 bytes need head_dim to be a multiple of 8 in fp16 and bf16.
    if work.head_dim % 8 == 0:
        return ()
    return (IdleReason("alignment", f"head_dim = {work.head_dim} is not a multiple of 8"),)
