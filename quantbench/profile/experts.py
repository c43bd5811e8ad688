"""Answers queries of a profile for mixture-of-experts layers: measured rows, else a model of the profile's own rows.

Entry point: `Experts`, used by `profile.profile`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from quantbench.device.spec import DeviceSpec
from quantbench.errors import UnsupportedError
from quantbench.latency.estimate import Estimate
from quantbench.latency.libraries import LIBRARIES
from quantbench.latency.moe import FEWEST_ROWS, MoEModel
from quantbench.profile.table import Table
from quantbench.workload import MoE


@dataclass(frozen=True)
class Experts:
    """Times of MoE layers on one device. table: of kind moe. Models are fitted on first use, and kept."""

    device: DeviceSpec
    table: Table
    _models: dict[tuple[str, str], MoEModel] = field(default_factory=dict)

    @cached_property
    def _works(self) -> list[MoE]:
        return [work for work in self.table.workloads() if isinstance(work, MoE)]

    @cached_property
    def _row_of(self) -> dict[tuple[MoE, str], int]:
        return {key: row for row, key in enumerate(zip(self._works, self.table["provider"].tolist(), strict=True))}

    def ask(self, works: Sequence[MoE], provider: str | None = None) -> list[Estimate]:
        """Returns one estimate per layer. provider: None for the one with most rows of the layer's dtype.

        Raises UnsupportedError if the provider measured no layer of the dtype.
        """
        found: dict[int, Estimate] = {}
        groups: dict[str, list[int]] = {}
        for i, work in enumerate(works):
            groups.setdefault(work.dtype, []).append(i)
        for dtype, places in groups.items():
            of_dtype = self.table["dtype"] == dtype
            of = provider or self.table.most("provider", of_dtype) or ""
            unknown = []
            for i in places:
                row = self._row_of.get((works[i], of))
                if row is None:
                    unknown.append(i)
                else:
                    us, low, high = (float(self.table[name][row]) for name in ("latency_us", "low_us", "high_us"))
                    found[i] = Estimate(us, low, high, "measured", note=f"measured by {of}")
            if unknown:
                said = self._model(dtype, of, provider is not None).predict([works[i] for i in unknown])
                found.update(zip(unknown, said, strict=True))
        return [found[i] for i in range(len(works))]

    def _model(self, dtype: str, provider: str, asked: bool) -> MoEModel:
        key = (dtype, provider)
        if key not in self._models:
            rows = np.flatnonzero((self.table["dtype"] == dtype) & (self.table["provider"] == provider))
            library = provider.partition(".")[0]
            if asked and not len(rows):
                raise UnsupportedError("profile.moe", f"no layer of {dtype} by {provider}", "a provider with rows")
            if len(rows) < FEWEST_ROWS:
                made = MoEModel.best(self.device, dtype=dtype, library=library if library in LIBRARIES else "")
            else:
                library = library if library in LIBRARIES else "torch"
                times_us = self.table["latency_us"][rows]
                made = MoEModel.fit(self.device, [self._works[i] for i in rows], times_us, library=library)
            self._models[key] = made
        return self._models[key]
