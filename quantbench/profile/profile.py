"""Builds, saves, loads and queries the profile of one GPU.

`Profile.from_runs` builds a profile from measured runs. A profile has tables of times, models for
unmeasured shapes, cliffs (jumps of the time between neighbouring sizes) and verdicts on rules of
thumb.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from quantbench import __version__
from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError
from quantbench.latency.estimate import Estimate
from quantbench.latency.moe import MoEModel
from quantbench.latency.op_times import CORRELATION, OpEstimate, ShapeEstimate, total
from quantbench.profile import file
from quantbench.profile.answers import Experts, ProfileEstimates, Shapes, collective_estimates
from quantbench.profile.models import Models, models_from_json, models_to_json
from quantbench.profile.schema import (
    PROFILE_FORMAT,
    PROFILE_VERSION,
    KnownCliff,
    ProfileFile,
    Provenance,
)
from quantbench.profile.table import LAYOUTS, Table, check_table
from quantbench.rules import Verdict
from quantbench.store.folder import Run
from quantbench.workload import MoE, TransformerShape
from quantbench.workload.kinds import Compute

#: One size, or an array of sizes.
Size = npt.ArrayLike
#: Result of a query: an Estimate for plain numbers, ProfileEstimates for arrays.
Answer = Estimate | ProfileEstimates


@dataclass(frozen=True)
class Profile:
    """Measured times and models of one device, with methods that estimate times from them.

    software: versions by name.
    provenance: runs from which the profile was built.
    tables: measured tables by kind (gemm, softmax, attention, moe, collective). Each may be empty.
    models: models that were fitted to the tables, or shipped models.
    cliffs: known cliffs, largest first.
    findings: verdicts on rules of thumb.

    Raises InputError for a row with an invalid workload or an impossible time.
    """

    device: DeviceSpec
    software: Mapping[str, str]
    provenance: Provenance
    tables: Mapping[str, Table]
    models: Models = field(default_factory=Models)
    cliffs: tuple[KnownCliff, ...] = ()
    findings: tuple[Verdict, ...] = ()

    def __post_init__(self) -> None:
        for kind, table in self.tables.items():
            if kind != table.kind:
                raise InputError("profile", f"a table of {table.kind} called {kind}", "one name")
            check_table(table, self.device)
        filled = {kind: self.tables.get(kind) or Table.empty(kind) for kind in LAYOUTS}
        object.__setattr__(self, "tables", filled)

    @classmethod
    def from_runs(cls, runs: Sequence[Run], *, fit: bool = True, seed: int = 0) -> Profile:
        """Builds a profile from the runs of one device. The order of the runs does not matter.

        fit: whether to fit models to the rows. If False, the profile has the shipped models.
        seed: the same runs and seed give the same models.

        Raises InputError if there is no run or no measured point, if a run is given twice, if the
        runs' devices or cache states differ, and if simulated runs are mixed with other runs.
        """
        from quantbench.profile.build import (
            parts_of,
        )  # imported here, because the analysis of runs takes longest to import

        return cls(**parts_of(runs, fit=fit, seed=seed))

    @classmethod
    def shipped(cls, device: DeviceSpec) -> Profile:
        """Returns a profile without rows, which estimates times with the shipped models."""
        return cls(device, {}, Provenance(__version__), {})

    def save(self, path: str | Path) -> None:
        """Writes a JSON file, and a Parquet file beside it for each large table.

        path: the JSON file.

        Raises InputError for a number that is not finite, and StoreError if the files cannot be
        written.
        """
        content = ProfileFile(
            PROFILE_FORMAT,
            PROFILE_VERSION,
            "",
            self.device,
            self.software,
            self.provenance,
            models_to_json(self.models),
            self.cliffs,
            self.findings,
            tables={},
        )
        file.write_document(Path(path), content, self.tables)

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Reads a profile.

        path: the JSON file, or a folder with a file profile.json.

        Raises StoreError if a file cannot be read or was changed, and InputError for invalid
        content.
        """
        where = Path(path)
        if os.path.isdir(where):
            where /= "profile.json"
        try:
            found, tables = file.read_document(where)
            models = models_from_json(found.models, found.device)
            known = (found.device, found.software, found.provenance)
            return cls(*known, tables, models, found.cliffs, found.findings)
        except InputError as error:
            what = f"profile {path}: {error.operation}"
            raise InputError(what, error.value, error.expected) from None

    @cached_property
    def _shapes(self) -> Shapes:
        return Shapes(self.device, self.tables, self.models)

    @cached_property
    def _experts(self) -> Experts:
        return Experts(self.device, self.tables["moe"])

    @cached_property
    def _sources(self) -> Counter[str]:
        """Number of workloads estimated by `estimates` so far, by source of the time."""
        return Counter()

    def gemm(
        self,
        m: Size,
        n: Size,
        k: Size,
        *,
        dtype: str | None = None,
        layout: str | None = None,
        batch: Size = 1,
        provider: str | None = None,
    ) -> Answer:
        """Estimates the time of GEMMs (m×k) · (k×n).

        Plain numbers give an Estimate. Arrays broadcast and give ProfileEstimates.

        dtype, layout, provider: None selects the value with the most rows. A dtype without rows
            uses the rows of its twin dtype (`TWINS`). A layout without rows uses the rows of the
            most frequent layout. In both cases, the result has a wider interval and a note.
        batch: number of independent GEMMs in one call.

        Raises InputError for invalid sizes and for a provider without rows, and UnsupportedError
        for a dtype that the device does not support.
        """
        return self._shapes.estimate("gemm", (dtype, layout, provider), (m, n, k, batch))

    def softmax(
        self,
        batch: Size,
        rows: Size,
        cols: Size,
        *,
        dtype: str | None = None,
        mask: str = "causal",
        direction: str = "forward",
        provider: str | None = None,
    ) -> Answer:
        """Estimates the time of softmax over the last dimension of (batch, rows, cols).

        batch: number of matrices; in a transformer, heads / tensor-parallel GPUs × micro-batch.
        dtype, provider: as in `gemm`.
        mask: causal or full.
        direction: forward or backward.

        Raises InputError for a causal mask with rows unequal to cols.
        """
        if mask == "causal" and np.any(np.not_equal(rows, cols)):
            what = "mask = 'causal' with rows unlike cols"
            raise InputError("profile.softmax", what, "rows equal to cols")
        return self._shapes.estimate(
            "softmax", (dtype, mask, direction, provider), (batch, rows, cols)
        )

    def attention(
        self,
        batch: Size,
        heads: Size,
        seq_q: Size,
        seq_k: Size,
        head_dim: Size,
        kv_heads: Size = 0,
        *,
        dtype: str | None = None,
        causal: bool = True,
        direction: str = "forward",
        provider: str | None = None,
    ) -> Answer:
        """Estimates the time of fused attention.

        kv_heads: number of key/value heads, which divides heads; 0 means the number of heads.
        dtype, provider: as in `gemm`.

        Raises InputError for causal attention with seq_q unequal to seq_k, and if kv_heads does
        not divide heads.
        """
        if causal and np.any(np.not_equal(seq_q, seq_k)):
            what = "causal with seq_q unlike seq_k"
            raise InputError("profile.attention", what, "seq_q equal to seq_k")
        kv: Any = np.where(np.equal(kv_heads, 0), heads, kv_heads)
        if type(kv_heads) is int:  # only estimates for plain integers are cached
            kv = kv_heads or heads
        if np.any(np.asarray(heads) % np.maximum(kv, 1) != 0):
            what = f"kv_heads = {kv} of {heads!s} heads"[:100]
            raise InputError("profile.attention", what, "a divisor of heads")
        sizes = (batch, heads, kv, seq_q, seq_k, head_dim)
        return self._shapes.estimate("attention", (dtype, causal, direction, provider), sizes)

    def collective(
        self,
        op: str,
        message_bytes: Size,
        num_gpus: int,
        *,
        num_nodes: int = 1,
        dtype: str | None = None,
        provider: str | None = None,
    ) -> Answer:
        """Estimates the time of a collective between num_gpus GPUs, spread evenly over the nodes.

        op: name of the collective, as in `workload.Collective`.
        message_bytes: size of the message, as in `workload.Collective` (nccl-tests' `size`).
            Unmeasured sizes are interpolated.
        num_gpus, num_nodes: numbers over which the op was measured. They are not interpolated.
        dtype, provider: None selects the value with the most rows. A dtype without rows uses the
            rows of the most frequent dtype, with a wider interval and a note.

        Raises UnsupportedError if the op was not measured over this number of GPUs and nodes, and
        InputError for invalid sizes and for a provider without rows.
        """
        return collective_estimates(
            self.tables["collective"], op, message_bytes, num_gpus, num_nodes, dtype, provider
        )

    def moe(self, works: Sequence[MoE], *, provider: str | None = None) -> list[Estimate]:
        """Estimates the time of each layer's experts on the layer's busiest GPU.

        A layer with a measured row gets the row's time, any other layer the model's time.

        provider: None selects the provider with the most rows of the layer's dtype.

        Raises UnsupportedError if `provider` is given but has no row of a layer's dtype.
        """
        found = self._experts.estimates(works, provider)
        return [found[work] for work in works]

    def experts(self, dtype: str, library: str) -> MoEModel:
        """Returns the model for MoE layers of a dtype, run by a library or provider.

        library: a library, or a provider such as trtllm.cutlass. With few rows of it, the model is
            the shipped model.
        """
        return self._experts.model(dtype, library)

    def layer(self, shape: TransformerShape, *, backward: bool = True) -> ShapeEstimate:
        """Estimates the time of one transformer layer for one micro-batch on one GPU.

        The time is the sum over the layer's ops. Logits, norms, activations and communication are
        not included.

        backward: whether to include the backward pass.
        """
        ops = [replace(op, count=1) for op in shape.ops(backward=backward) if op.name != "logits"]
        found = self.estimates([op.workload for op in ops])
        return total([OpEstimate(op, one) for op, one in zip(ops, found, strict=True)], CORRELATION)

    @property
    def gemm_error(self) -> float | None:
        """Half-width in log time of interpolated GEMMs' 90 % interval; None without GEMM rows.

        The half-width comes from leave-one-out errors in the rows with the most frequent dtype,
        layout and provider.
        """
        surface = self._shapes.chosen("gemm", (None, None, None)).surface
        return surface.trust.half_width if len(surface.latency_us) else None

    def estimates(self, workloads: Sequence[Compute]) -> list[Estimate]:
        """Returns one estimate per workload, in order; implements `OpTimes.estimates`."""
        layers: list[MoE] = []
        others: list[Compute] = []
        for work in workloads:
            if isinstance(work, MoE):
                layers.append(work)
            else:
                others.append(work)
        found: dict[Any, Estimate] = {
            **self._experts.estimates(layers),
            **self._shapes.estimates(others),
        }
        self._sources.update(one.source for one in found.values())
        return [found[work] for work in workloads]

    @property
    def note(self) -> str:
        """Text with the number of rows by table, and the number of estimates so far by source."""
        counted = ", ".join(f"{count} {source}" for source, count in self._sources.most_common())
        rows = ", ".join(
            f"{len(table):,} {kind}" for kind, table in self.tables.items() if len(table)
        )
        content = f"profile of {self.device.name}: {rows or 'no'} rows"
        answered = f"of what was asked {counted}" if counted else ""
        return "; ".join(filter(None, (content, self.provenance.note, answered)))

    @property
    def common_error(self) -> float:
        """Fraction of the error variance that ops of one kind share; implements `OpTimes`.

        The fraction is 0, as for any source of times that has measurements of the device.
        """
        return 0.0
