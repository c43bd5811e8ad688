"""Finds size ranges in which an imported GEMM table disagrees with the GPU's shipped model.

Such a table's times may include the host's time in addition to the kernel's time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from quantbench.device.spec import DeviceSpec
from quantbench.importers.runs import Row
from quantbench.latency.gemm.model import GemmModel
from quantbench.latency.model_times import best_gemm_model
from quantbench.workload import Gemm

#: Table and model disagree if the median ratio of their times is above this factor or below its
#: inverse.
_FACTOR = 3.0
#: Upper limits of the regions of m, in which table and model are compared separately.
_REGIONS = (64, 1024, 2**31)
#: smallest number of rows that a region needs for a comparison
_FEWEST = 20
#: largest number of rows of a region that are compared
_MOST = 500


def disagreements(device: DeviceSpec, rows: Sequence[Row]) -> Iterator[str]:
    """Yields a line for each dtype and region of m in which the table disagrees with the model.

    Table and model disagree if the median ratio of measured to predicted time is above 3 or below
    1/3. A dtype whose model is an unfitted prior is not compared.

    rows: rows of the table. Only unbatched GEMMs are compared.
    """
    regions: dict[tuple[str, int], list[tuple[Gemm, float]]] = defaultdict(list)
    for row in rows:
        work = row.workload
        if isinstance(work, Gemm) and work.batch == 1 and device.peak(work.dtype) is not None:
            most = next(most for most in _REGIONS if work.m <= most)
            regions[work.dtype, most].append((work, row.latency_us))
    models: dict[str, GemmModel] = {}
    for (dtype, most), found in sorted(regions.items()):
        model = models.setdefault(dtype, best_gemm_model(device, dtype)[0])
        if len(found) < _FEWEST or not model.rows:
            continue
        few = found[:: -(-len(found) // _MOST)]  # evenly spaced rows, at most _MOST
        sizes = np.array([(work.m, work.n, work.k) for work, _ in few]).T
        ratios = np.array([us for _, us in few]) / model.predict(*sizes, layout="nt").latency_us
        ratio = float(np.median(ratios))
        if not 1 / _FACTOR < ratio < _FACTOR:
            where = f"m <= {most}" if most < _REGIONS[-1] else f"m > {_REGIONS[-2]}"
            yield (
                f"{dtype} products with {where}: their median is {ratio:.2g} times what the model "
                f"of {model.library} says; the table may hold more than the kernel"
            )
