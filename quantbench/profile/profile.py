"""The profile of one GPU: what was measured on it, as tables, models and findings that planners can ask."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy.typing as npt

from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError
from quantbench.latency.estimate import Estimate
from quantbench.profile import file
from quantbench.profile import parts as codec
from quantbench.profile.answers import Asker
from quantbench.profile.checks import check_table
from quantbench.profile.collectives import ask_collective
from quantbench.profile.estimate import Estimates, LayerEstimate, layer_of
from quantbench.profile.file import PROFILE_VERSION
from quantbench.profile.models import Models, models_from_json, models_to_json
from quantbench.profile.parts import Finding, KnownCliff, Provenance
from quantbench.profile.table import LAYOUTS, Table
from quantbench.workload import TransformerShape
from quantbench.workload.ops import Compute

if TYPE_CHECKING:
    from quantbench.store.folder import Run


@dataclass(frozen=True)
class Profile:
    """Everything that a profile holds; checked when it is made, so that there is no profile with impossible figures.

    tables: by kind (gemm, softmax, attention, collective), an empty one where nothing was measured. models: fitted to
    them. cliffs: the largest first. findings: rules, judged.
    """

    device: DeviceSpec
    software: Mapping[str, str]
    provenance: Provenance
    tables: Mapping[str, Table]
    models: Models = field(default_factory=Models)
    cliffs: tuple[KnownCliff, ...] = ()
    findings: tuple[Finding, ...] = ()

    def __post_init__(self) -> None:
        for kind, table in self.tables.items():
            if kind != table.kind:
                raise InputError("profile", f"a table of {table.kind} called {kind}", "one name")
            check_table(table, self.device)
        filled = {kind: self.tables.get(kind) or Table.empty(kind) for kind in LAYOUTS}
        object.__setattr__(self, "tables", filled)

    @classmethod
    def from_runs(cls, runs: Sequence[Run], *, fit: bool = True, seed: int = 0) -> Profile:
        """The profile of runs of one device, in any order: the same runs give the same profile.

        fit: fit models to the rows (else the shipped or expected ones are taken). Raises InputError for runs of
        different devices, of simulated beside measured ones, and of cold beside hot caches.
        """
        from quantbench.profile.build import build

        return build(cls, runs, fit=fit, seed=seed)

    def save(self, path: str | Path) -> None:
        """Write it to a JSON file, with Parquet files beside it for large tables."""
        parts = {
            "version": PROFILE_VERSION,
            "device": codec.device_to_json(self.device),
            "software": dict(self.software),
            "provenance": codec.provenance_to_json(self.provenance),
            "models": models_to_json(self.models),
            "cliffs": [codec.cliff_to_json(cliff) for cliff in self.cliffs],
            "findings": [codec.finding_to_json(finding) for finding in self.findings],
        }
        file.write_document(Path(path), parts, dict(self.tables))

    @classmethod
    def load(cls, path: str | Path) -> Profile:
        """Read a profile: its JSON file, or the folder in which that is called profile.json.

        Raises StoreError for a file that cannot be read or was changed, InputError for one that holds what cannot be.
        """
        where = Path(path)
        parts, tables = file.read_document(where / "profile.json" if os.path.isdir(where) else where)
        device = codec.device_from_json(parts["device"])
        return cls(
            device,
            codec.software_from_json(parts["software"]),
            codec.provenance_from_json(parts["provenance"]),
            tables,
            models_from_json(parts["models"], device),
            codec.cliffs_from_json(parts["cliffs"]),
            codec.findings_from_json(parts["findings"]),
        )

    @cached_property
    def _asker(self) -> Asker:
        return Asker(self)

    def gemm(
        self,
        m: npt.ArrayLike,
        n: npt.ArrayLike,
        k: npt.ArrayLike,
        *,
        dtype: str | None = None,
        layout: str | None = None,
        batch: npt.ArrayLike = 1,
        provider: str | None = None,
    ) -> Estimate | Estimates:
        """The time of products m×k times k×n: an Estimate for plain numbers, Estimates for arrays, which broadcast.

        dtype, layout, provider: None stands for what the profile has most rows of. A format or layout that was not
        measured is answered by the one that is most alike, and the answer's note says so. Raises InputError for what
        is no size, UnsupportedError for a format that the device does not have.
        """
        return self._asker.gemm(m, n, k, dtype, layout, batch, provider)

    def softmax(
        self,
        batch: npt.ArrayLike,
        rows: npt.ArrayLike,
        cols: npt.ArrayLike,
        *,
        dtype: str | None = None,
        mask: str = "causal",
        direction: str = "forward",
        provider: str | None = None,
    ) -> Estimate | Estimates:
        """The time of softmax over the last dimension of (batch, rows, cols); batch: heads / TP × MBS."""
        return self._asker.softmax(batch, rows, cols, dtype, mask, direction, provider)

    def attention(
        self,
        batch: npt.ArrayLike,
        heads: npt.ArrayLike,
        seq_q: npt.ArrayLike,
        seq_k: npt.ArrayLike,
        head_dim: npt.ArrayLike,
        kv_heads: npt.ArrayLike = 0,
        *,
        dtype: str | None = None,
        causal: bool = True,
        direction: str = "forward",
        provider: str | None = None,
    ) -> Estimate | Estimates:
        """The time of fused attention; kv_heads 0 stands for heads."""
        sizes = (batch, heads, kv_heads, seq_q, seq_k, head_dim)
        return self._asker.attention(sizes, dtype, causal, direction, provider)

    def collective(
        self,
        op: str,
        message_bytes: npt.ArrayLike,
        num_gpus: int,
        *,
        num_nodes: int = 1,
        dtype: str | None = None,
        provider: str | None = None,
    ) -> Estimate | Estimates:
        """The time of a collective between num_gpus GPUs of this kind, spread evenly over num_nodes machines; sizes as
        `workload.Collective` has them (nccl-tests' `size`). Only message sizes are interpolated: raises
        UnsupportedError for an op or a number of GPUs or nodes that was not measured, InputError for what is no size.
        """
        return ask_collective(self.tables["collective"], op, message_bytes, num_gpus, num_nodes, dtype, provider)

    def layer(self, shape: TransformerShape, *, backward: bool = True) -> LayerEstimate:
        """The time of one layer of `shape` for one micro-batch on one GPU: its products, softmax and attention, without
        the logits; norms, activations and communication are not in it."""
        ops = [replace(op, count=1) for op in shape.ops(backward=backward) if op.name != "logits"]
        return layer_of(ops, self.estimates([op.workload for op in ops]))

    def trust(self, kind: str) -> float | None:
        """Half-width, in log time, of the 90 % interval between measured shapes of the profile's main format of `kind`,
        found by leaving each row out; None where it was not asked for or there are too few rows."""
        return self._asker.trust(kind)

    def estimates(self, workloads: Sequence[Compute]) -> list[Estimate]:
        """An estimate of each workload, in their order (`latency.op_times.OpTimes`)."""
        return self._asker.works(workloads)

    @property
    def note(self) -> str:
        """What the profile holds, and how many of the estimates that were asked for so far are measured."""
        counted = ", ".join(f"{count} {source}" for source, count in self._asker.sources.most_common())
        rows = ", ".join(f"{len(table):,} {kind}" for kind, table in self.tables.items() if len(table))
        held = f"profile of {self.device.name}: {rows or 'no'} rows"
        asked = f"of what was asked {counted}" if counted else ""
        return "; ".join(filter(None, (held, self.provenance.note, asked)))

    @property
    def common_error(self) -> float:
        """Nothing: where it was measured, it is right on average (`latency.op_times.OpTimes`)."""
        return 0.0
