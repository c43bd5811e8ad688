"""The profile of one GPU: what was measured on it, as tables, models and findings that planners can ask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from quantbench.device.spec import DeviceSpec
from quantbench.errors import InputError
from quantbench.profile import codec, file
from quantbench.profile.checks import check_table
from quantbench.profile.columns import LAYOUTS
from quantbench.profile.migrations import PROFILE_VERSION
from quantbench.profile.models import Models, models_from_json, models_to_json
from quantbench.profile.parts import Finding, KnownCliff, Provenance
from quantbench.profile.table import Table

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
        """Read a profile. Raises StoreError for a file that cannot be read or was changed, InputError for one that
        holds what cannot be."""
        parts, tables = file.read_document(Path(path))
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
