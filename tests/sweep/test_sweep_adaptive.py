"""An adaptive sweep on a made-up GPU whose time is a roofline: rounds, counts, resuming, what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from sweep_doubles import A100, Bench, QuietWorker, measured

from quantbench.errors import InputError
from quantbench.latency.op_times import roofline_us
from quantbench.store.folder import read_run
from quantbench.sweep.axes import Held
from quantbench.sweep.messages import Reply, Request
from quantbench.sweep.options import SweepOptions, plan_sweep, whole_plan
from quantbench.sweep.session import SweepSession
from quantbench.workload import Gemm

OPTIONS = SweepOptions(
    dims=("m=64:4096:192", "n=256:8192:512"), held=Held(k=1024, layout="nt"), providers=("torch.mm",), points=40,
    adaptive=True,
)  # fmt: skip


def answer(request: Request) -> Reply:
    return measured(roofline_us(request.workload, A100))


def sweep(tmp_path: Path, session: SweepSession | None = None, stop_after: int | None = None) -> SweepSession:
    bench = Bench(None, answer)  # type: ignore[arg-type]

    def connect() -> QuietWorker:
        asked = 0

        def stopping(request: Request) -> Reply:
            nonlocal asked
            asked += 1
            if stop_after is not None and asked > stop_after:
                raise KeyboardInterrupt
            return answer(request)

        return QuietWorker(stopping, bench.clock)

    made = (
        SweepSession.resume(session.folder, connect)
        if session
        else SweepSession.new(lambda spec: OPTIONS, tmp_path, connect)
    )
    with made:
        if stop_after is None:
            made.run(lambda progress: None, clock=bench.clock)
        else:
            with pytest.raises(KeyboardInterrupt):
                made.run(lambda progress: None, clock=bench.clock)
    return made


def sizes(session: SweepSession) -> list[tuple[int, int]]:
    found = []
    for record in read_run(session.folder).records:
        if record.role == "point":
            assert isinstance(record.workload, Gemm)
            found.append((record.workload.m, record.workload.n))
    return found


@pytest.mark.slow
def test_it_measures_as_many_as_asked_for_none_twice(tmp_path: Path) -> None:
    found = sizes(sweep(tmp_path))
    assert len(found) == len(set(found)) == 40
    begun = [(p.workload.m, p.workload.n) for p in plan_sweep(OPTIONS, A100)[1].points]  # type: ignore[union-attr]
    assert found[: len(begun)] == begun
    at_random = [(p.workload.m, p.workload.n) for p in whole_plan(OPTIONS, A100)[1].points[:40]]  # type: ignore[union-attr]
    assert set(found) != set(at_random)


@pytest.mark.slow
def test_it_is_taken_up_where_it_was_left(tmp_path: Path) -> None:
    stopped = sweep(tmp_path, stop_after=25)
    before = sizes(stopped)
    assert 10 < len(before) < 40
    after = sizes(sweep(tmp_path, session=stopped))
    assert after[: len(before)] == before
    assert len(after) == len(set(after)) == 40


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"points": 0}, "--adaptive without --points; expected how many points"),
        ({"providers": ("torch.mm", "triton.stream_k")}, "--adaptive: 2 kinds of points; expected products of one"),
        ({"dims": ("m=64:128:64", "batch=2,3")}, "--adaptive: batched products; expected products without batches"),
    ],
)
def test_what_the_model_cannot_choose_from_is_refused(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    from dataclasses import replace

    def connect() -> QuietWorker:
        return QuietWorker(answer, lambda: 0.0)  # type: ignore[arg-type]

    with (
        pytest.raises(InputError, match=message),
        SweepSession.new(
            lambda spec: replace(OPTIONS, **changes),
            tmp_path,
            connect,  # type: ignore[arg-type]
        ) as session,
    ):
        session.run(lambda progress: None)
    assert list(tmp_path.iterdir()) == []
