"""Doubles for the sweep's loop: a worker, a writer and a clock made of literals."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from io import StringIO

from made_devices import A100, STATE
from made_runs import measurement
from rich.console import Console

from quantbench.launch import Launch, Tile
from quantbench.measurement import Check
from quantbench.store.record import Record
from quantbench.sweep.axes import Held, parse_axis, with_defaults
from quantbench.sweep.messages import Hello, Reply, Request
from quantbench.sweep.options import SweepOptions
from quantbench.sweep.plan import Plan, build_plan
from quantbench.sweep.runner import Progress, Sweep, SweepJob
from quantbench.timing.options import TimingOptions

HELD = with_defaults(Held(m=1024, k=1024), A100)


def measured(us: float) -> Reply:
    launch, phases_s = Launch("k", tile=Tile(128, 128)), {"measuring": 0.5}
    return Reply(
        measurement=measurement((us,) * 20),
        launch=launch,
        checked=Check(1e-3, 5e-3),
        phases_s=phases_s,
    )


def steady(request: Request) -> Reply:
    return measured(100.0)


@dataclass
class Clock:
    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class FakeWorker:
    """Answers each request by a function of it; every answer takes a second."""

    answer: Callable[[Request], Reply]
    clock: Clock
    hello: Hello = field(default_factory=lambda: Hello(A100, STATE, {}))
    asked: list[Request] = field(default_factory=list)
    closed: bool = False

    def begin(self, timing: TimingOptions) -> None:
        raise AssertionError("the session begins workers, not the loop")

    def ask(self, request: Request, limit_s: float, tick: Callable[[], None]) -> Reply:
        assert not self.closed
        self.asked.append(request)
        self.clock.now_s += 1.0
        tick()
        return self.answer(request)

    def close(self) -> None:
        self.closed = True


@dataclass
class Bench:
    """A sweep over `plan` with everything around it recorded."""

    plan: Plan
    answer: Callable[[Request], Reply] = steady
    clock: Clock = field(default_factory=Clock)
    workers: list[FakeWorker] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    progress: list[Progress] = field(default_factory=list)

    def append(self, record: Record) -> None:
        self.records.append(record)

    def connect(self) -> FakeWorker:
        self.workers.append(FakeWorker(self.answer, self.clock))
        return self.workers[-1]

    def sweep(self, **options: object) -> Sweep:
        of_sweep = {name: options.pop(name) for name in ("more", "connect") if name in options}
        job = SweepJob(self.plan, "run", A100, TimingOptions(), **options)  # type: ignore[arg-type]
        given = {
            "connect": self.connect,
            "on_progress": lambda p: self.progress.append(replace(p)),
            **of_sweep,
        }
        return Sweep(job, append=self.append, clock=self.clock, **given)  # type: ignore[arg-type]

    def of_role(self, role: str) -> list[Record]:
        return [r for r in self.records if r.role == role]


def plan_of(count: int) -> Plan:
    axis = parse_axis(f"n=1024:{1024 + 64 * (count - 1)}:64")
    return build_plan((axis,), HELD, ("torch.mm",), TimingOptions(), A100)


QUICK = TimingOptions(max_time_s=0.05, min_samples=3, half_width=0.1, cache="hot")
OPTIONS = SweepOptions(dims=("n=1024:8192:64",), held=Held(m=1024, k=1024), providers=("torch.mm",))


class QuietWorker(FakeWorker):
    """A worker whose timing options are of no interest here."""

    def begin(self, timing: object) -> None:
        pass


def recording(width: int = 300) -> Console:
    """A console that keeps what it prints."""
    return Console(width=width, record=True, file=StringIO())
