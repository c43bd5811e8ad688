"""Writes the softmax models that the package ships: `python -m tools.ship_softmax`.

Each is fitted to a GPU's rows of NeuSight's table (`tables.read_softmax`) and states the error, on
rows that it did not see, of a fit to half of them.
"""

from __future__ import annotations

import json
from typing import Any

from quantbench.device import lookup
from quantbench.files import write_file
from quantbench.latency.softmax import SHIPPED, SoftmaxModel
from tools.accuracy.scoring import random_split, summarize
from tools.published_tables import SOFTMAX_GPUS, SoftmaxTable, read_softmax


def _shipped(gpu: str, table: SoftmaxTable) -> dict[str, Any]:
    device = lookup(gpu)
    split = random_split(len(table), len(table) // 2, seed=0)
    half = table.take(split.train)
    test = table.take(split.test)
    judged = SoftmaxModel.fit(device, half.works, half.latency_us, library="torch")
    held_out = summarize(judged.predict(test.works).latency_us, test.latency_us).rounded()
    del held_out["mean_pct"]
    whole = SoftmaxModel.fit(device, table.works, table.latency_us, library="torch")
    return {**whole.to_json(), "provenance": {**table.provenance, "held_out": held_out}}


def main() -> None:
    """Fits and writes one model for each GPU; takes seconds."""
    models = {gpu: _shipped(gpu, read_softmax(gpu)) for gpu in SOFTMAX_GPUS}
    write_file("ship_softmax", SHIPPED, json.dumps({"models": models}, indent=1) + "\n")
    for gpu, model in models.items():
        print(f"{gpu}: {model['rows']:,} rows, held out {model['provenance']['held_out']}")


if __name__ == "__main__":
    main()
