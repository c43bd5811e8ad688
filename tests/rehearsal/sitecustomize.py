"""Puts the device double in CUDA's place, in every Python process started with QUANTBENCH_REHEARSAL set.

Python imports a module of this name at its start. Each patch is applied right after its module was imported.
"""

import os
import sys
from importlib.machinery import ModuleSpec, PathFinder

if os.environ.get("QUANTBENCH_REHEARSAL"):
    import device_double

    class _Patching:
        """Finds the modules to patch as usual, and patches each after it ran."""

        @staticmethod
        def find_spec(name: str, path: object = None, target: object = None) -> ModuleSpec | None:
            patch = device_double.PATCHES.get(name)
            spec = PathFinder.find_spec(name, path) if patch else None  # type: ignore[arg-type]
            if spec is None or spec.loader is None:
                return None
            run = spec.loader.exec_module

            def run_and_patch(module: object) -> None:
                run(module)  # type: ignore[arg-type]
                patch(module)

            spec.loader.exec_module = run_and_patch  # type: ignore[assignment,method-assign]
            return spec

    sys.meta_path.insert(0, _Patching)  # type: ignore[arg-type]
