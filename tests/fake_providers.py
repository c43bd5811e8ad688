"""Providers that misbehave, for tests of the worker process; a sweep names them `tests.fake_providers:Class`."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import ClassVar

import torch

from quantbench.device.spec import DeviceSpec
from quantbench.errors import UnsupportedError
from quantbench.providers.base import Tolerance
from quantbench.workload import Workload

#: names the file that holds `Held` up; the sizes that it sees before that
HOLD, HELD_AFTER = "QUANTBENCH_TEST_HOLD", 24


class _Task:
    """A product of two small random matrices, whatever the workload asks for."""

    def __init__(self, seed: int, m: int = 64, n: int = 64, k: int = 64) -> None:
        generator = torch.Generator().manual_seed(seed)
        self._a, self._b = (torch.randn(*shape, generator=generator) for shape in ((m, k), (k, n)))
        self._out = torch.empty(m, n)

    def run(self) -> None:
        torch.mm(self._a, self._b, out=self._out)

    def outputs(self) -> tuple[torch.Tensor, ...]:
        return (self._out,)

    def reference(self) -> tuple[torch.Tensor, ...]:
        return (self._a.double() @ self._b.double(),)

    def launch(self) -> None:
        return None


class Good:
    """Does what it should."""

    id = "tests.fake_providers:Good"

    def unsupported(self, workload: Workload, device: DeviceSpec) -> str | None:
        return None

    def prepare(self, workload: Workload, device: DeviceSpec, *, distribution: str = "normal", seed: int = 0) -> _Task:
        return _Task(seed)

    def tolerance(self, workload: Workload) -> Tolerance:
        return Tolerance(1e-5, "fp32")


def _even(workload: Workload) -> bool:
    return getattr(workload, "n", 0) % 2 == 0


class Picky(Good):
    def unsupported(self, workload: Workload, device: DeviceSpec) -> str | None:
        return None if _even(workload) else "odd n is not supported"


class PickyLate(Good):
    def prepare(self, workload, device, *, distribution="normal", seed=0):  # type: ignore[no-untyped-def]
        if not _even(workload):
            raise UnsupportedError("PickyLate", f"n = {workload.n}", "an even n")
        return _Task(seed)


class Wrong(Good):
    """Computes something else."""

    id = "tests.fake_providers:Wrong"

    def prepare(self, workload, device, *, distribution="normal", seed=0):  # type: ignore[no-untyped-def]
        task = _Task(seed)
        task._b = task._b.clone()
        task.reference = lambda: (2 * task._a.double(),)  # type: ignore[method-assign]
        return task


class Held(Good):
    """Products in fp32 as they are asked for; after HELD_AFTER sizes it waits while the file that HOLD names is there,
    so that a test can stop a sweep that is surely not finished."""

    id = "tests.fake_providers:Held"
    _sizes: ClassVar[set[int]] = set()

    def prepare(self, workload, device, *, distribution="normal", seed=0):  # type: ignore[no-untyped-def]
        self._sizes.add(workload.n)
        while len(self._sizes) > HELD_AFTER and os.path.exists(os.environ.get(HOLD, "")):
            time.sleep(0.01)
        return _Task(seed, workload.m, workload.n, workload.k)


class GivesNan(Good):
    """Computes what is not a number."""

    id = "tests.fake_providers:GivesNan"

    def prepare(self, workload, device, *, distribution="normal", seed=0):  # type: ignore[no-untyped-def]
        task = _Task(seed)
        task.run = lambda: task._out.fill_(torch.nan)  # type: ignore[method-assign]
        return task


class _OnRun(Good):
    def act(self) -> None:
        raise AssertionError

    def prepare(self, workload, device, *, distribution="normal", seed=0):  # type: ignore[no-untyped-def]
        task = _Task(seed)
        # Only odd sizes misbehave, so that the points beside them show that the sweep goes on. The check of the
        # result, which runs on a stand-in of even size, passes.
        if not _even(workload):
            task.run = self.act  # type: ignore[method-assign]
        return task


class Segfault(_OnRun):
    def act(self) -> None:
        os.kill(os.getpid(), signal.SIGSEGV)


class Exits(_OnRun):
    def act(self) -> None:
        print("something went badly wrong", file=sys.stderr, flush=True)
        os._exit(7)


class Raises(_OnRun):
    def act(self) -> None:
        raise KeyError("a bug in the provider")


class OutOfMemory(_OnRun):
    def act(self) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 99 GiB")


class IllegalAccess(_OnRun):
    def act(self) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


class Hangs(_OnRun):
    def act(self) -> None:
        time.sleep(3600)
