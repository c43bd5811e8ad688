"""What a profile answers: measured shapes as they were measured, others along the model's edges,
and how it says so.
"""

from dataclasses import replace
from typing import Any

import made_profiles as made
import made_runs
import numpy as np
import pytest

from quantbench.errors import InputError, QuantbenchError
from quantbench.latency.gemm.inputs import LARGEST_SIDE
from quantbench.latency.gemm.model import GemmModel
from quantbench.latency.op_times import OpTimes
from quantbench.profile import Estimate, Profile
from quantbench.profile.interpolation import Lines, RowIndex, Surface
from quantbench.stats import median
from quantbench.workload import Attention, Gemm, Softmax, TransformerShape


def test_a_measured_shape_gives_the_measured_figure() -> None:
    record = made.gemm_records()[4]
    work, outcome = record.workload, record.outcome
    found = made.profile().gemm(work.m, work.n, work.k)
    assert found.latency_us == median(outcome.measurement.samples_us)
    assert (found.source, found.note, found.bound) == ("measured", "", "compute")
    assert found.low_us < found.latency_us < found.high_us
    # Of two providers the one with more rows answers.
    other = made_runs.record(
        work, (999.0, 1000.0, 1001.0), {"hidden": 2048}, provider="triton.gemm"
    )
    profile = Profile.from_runs([made.run([*made.gemm_records(), other])], fit=False)
    for provider, us in (
        (None, found.latency_us),
        ("torch.linear", found.latency_us),
        ("triton.gemm", 1000),
    ):
        assert profile.gemm(work.m, work.n, work.k, provider=provider).latency_us == us


def test_beyond_the_model_only_what_was_measured_is_answered() -> None:
    known, unknown = (Gemm(LARGEST_SIDE + beyond, 128, 64, layout="nt") for beyond in (1, 3))
    record = made_runs.record(known, (200.0, 201.0), {"m": known.m}, provider="torch.linear")
    profile = Profile.from_runs([made.run([*made.gemm_records(), record])], fit=False)
    assert profile.gemm(known.m, 128, 64).source == "measured"
    assert profile.gemm([known.m, 2048], 128, 64).source[0] == "measured"
    assert profile.gemm([LARGEST_SIDE, 2048], 128, 64).latency_us[0] > 0
    for ask in (
        lambda: profile.gemm(unknown.m, 128, 64),
        lambda: profile.gemm([known.m, unknown.m, unknown.m + 1], 128, 64),
        lambda: profile.gemm(unknown.m, 128, 64, dtype="fp16"),
        lambda: profile.estimates([known, unknown]),
    ):
        with pytest.raises(InputError, match=f"m = {unknown.m}; expected at most {LARGEST_SIDE}"):
            ask()
    # A batch is no side: it may be of any length.
    assert profile.gemm(2048, 2048, 128, batch=LARGEST_SIDE).source == "modelled"


def test_between_shapes_it_follows_the_edges_and_the_tables_own_level() -> None:
    """The made device is the model with a tilt that the model does not know."""
    hidden = np.arange(2048, 4097, 16)
    hidden = hidden[~np.isin(hidden, made.HIDDEN)]
    found = made.profile().gemm(2048, 3 * hidden, hidden)
    assert set(found.source) == {"interpolated"}
    true = np.array([made.true_us(Gemm(2048, 3 * int(h), int(h))) for h in hidden])
    assert np.abs(found.latency_us / true - 1).max() < 0.01
    # Straight lines between the measured shapes miss the steps by far more.
    straight = np.interp(
        hidden, made.HIDDEN, [made.true_us(Gemm(2048, 3 * h, h)) for h in made.HIDDEN]
    )
    assert np.abs(straight / true - 1).max() > 0.05
    assert ((found.low_us <= true) & (true <= found.high_us)).mean() > 0.85


def test_beyond_the_measured_range_it_says_so() -> None:
    inside, outside = (made.profile().gemm(m, 7000, 2500) for m in (2500, 50))
    assert (inside.source, inside.outside, inside.note) == ("modelled", False, "")
    assert (outside.source, outside.outside) == ("modelled", True)
    ranges = "m 1024 to 4096, n 4096 to 12288, k 2048 to 4096, batch 1 to 1"
    assert outside.note == f"outside the measured range ({ranges})"
    assert outside.high_us / outside.latency_us > inside.high_us / inside.latency_us
    several = made.profile().gemm([50, 2500], 7000, 2500)
    assert several.outside.tolist() == [True, False]
    assert several.note == "1 of 2 " + outside.note


def test_one_shape_and_many_give_the_same() -> None:
    rng = np.random.default_rng(0)
    works = [record.workload for record in made.gemm_records()]
    shapes = [(work.m, work.n, work.k) for work in works]  # type: ignore[union-attr]
    shapes += [(2048, 3 * k, k) for k in rng.integers(2048, 4096, 20).tolist()]
    shapes += [tuple(size) for size in rng.integers(1, 6000, (60, 3)).tolist()]
    found = made.profile().gemm(*np.array(shapes).T)
    alone = [made.profile().gemm(*shape) for shape in shapes]
    assert set(found.source) == {"measured", "interpolated", "modelled"}
    for name in ("source", "outside", "bound"):
        assert [getattr(x, name) for x in alone] == getattr(found, name).tolist()
    error = np.abs(np.array([x.latency_us for x in alone]) / found.latency_us - 1)
    # A few shapes lie within rounding of a tree's threshold and fall to its other side.
    assert np.quantile(error, 0.95) < 2e-3
    assert error.max() < 0.2


def test_arrays_broadcast_and_plain_numbers_stay_plain() -> None:
    profile = made.profile()
    found = profile.gemm(2048, np.array([[6144], [4096]]), [2048, 4096])
    for name in ("latency_us", "source", "bound", "outside"):
        assert getattr(found, name).shape == (2, 2)
    assert profile.gemm(np.int64(2048), 6144, 2048.0) == profile.gemm(2048, 6144, 2048)


@pytest.mark.parametrize(
    ("sizes", "value"),
    [
        ((0, 1, 1), "m = 0"),
        ((1, 1, [2, 2**31]), "k = 2147483648"),
        ((1, 1, float("nan")), "k = nan"),
        ((True, 1, 1), "m = True"),
        (("8", 1, 1), "m = '8'"),
        (([1, 2], [1] * 3, 1), "arrays of m (2,), n (3,), k (), batch ()"),
    ],
)
def test_what_is_no_size_is_refused(sizes: tuple[Any, ...], value: str) -> None:
    with pytest.raises(InputError) as error:
        made.profile().gemm(*sizes)
    assert (error.value.operation, error.value.value) == ("profile.gemm", value)


def test_formats_and_layouts_that_were_not_measured() -> None:
    shape = (2048, 6144, 2048)

    def asked(**options: str) -> Estimate:
        return made.profile().gemm(*shape, **options)

    plain, other, twin, single = (
        asked(),
        asked(layout="nn"),
        asked(dtype="fp16"),
        asked(dtype="fp32"),
    )
    assert other.note == "layout nn was not measured: taken to run as nt"
    assert other.high_us / other.latency_us > 1.1
    assert twin.note == "fp16 was not measured: taken to run as bf16"
    for found in (other, twin):
        assert (found.latency_us, found.source) == (plain.latency_us, "interpolated")
    assert single.source == "modelled"
    assert single.note.startswith("nobody measured fp32 on a100-sxm4-80gb: ")
    best = GemmModel.best(made.A100, dtype="fp32").predict(*shape, layout="nt")
    assert single.latency_us == pytest.approx(best.latency_us)
    # 19.5 TFLOP/s against 312: about sixteen times as long.
    assert 10 < single.latency_us / plain.latency_us < 20
    for name, value in (("dtype", "fp8"), ("provider", "cublas"), ("layout", "tt")):
        with pytest.raises(QuantbenchError, match=value):
            asked(**{name: value})


def test_nothing_is_faster_than_the_peak() -> None:
    rng = np.random.default_rng(1)
    m, n, k = (2 ** rng.integers(5, 15, 2000) for _ in range(3))
    found = made.profile().gemm(m, n, k)
    assert (found.low_us >= 2.0 * m * n * k / 312e6 * (1 - 1e-12)).all()
    assert (found.low_us <= found.latency_us).all()
    assert (found.latency_us <= found.high_us).all()


def test_softmax_and_attention() -> None:
    profile = made.profile()
    softmax, attention = profile.softmax, profile.attention
    sources = [
        found.source
        for found in (
            softmax(64, 1024, 1024), softmax(64, 1536, 1536), softmax(64, 1024, 2048, mask="none"),
            attention(1, 32, 1024, 1024, 128), attention(1, 32, 1536, 1536, 128),
        )
    ]  # fmt: skip
    assert sources == ["measured", "interpolated", "modelled", "measured", "interpolated"]
    backward = attention(1, 32, 1024, 1024, 128, direction="backward")
    assert (backward.source, backward.outside) == ("modelled", True)
    assert backward.note.endswith("the profile has no measured row of this kind")
    seq = np.array([512, 700, 4096])
    assert attention(1, 32, seq, seq, 128, 8).source.tolist() == ["modelled"] * 3
    with pytest.raises(InputError, match="causal with seq_q"):
        attention(1, 32, [512, 600], 512, 128)
    with pytest.raises(InputError, match="rows equal to cols"):
        softmax(1, [512, 600], 512)
    with pytest.raises(InputError, match="kv_heads"):
        attention(1, 32, 512, [512], 128, 5)


def test_a_layer_is_the_sum_of_its_operations() -> None:
    shape = TransformerShape(hidden=2048, heads=16, seq=2048, attention="flash")
    layer = made.profile().layer(shape)
    assert layer.latency_us == pytest.approx(sum(op.estimate.latency_us for op in layer.ops))
    forward = ["qkv", "attention", "proj", "mlp_up", "mlp_down"]
    assert [op.op.label for op in layer.ops][:5] == forward
    assert "logits" not in {op.op.name for op in layer.ops}
    assert layer.low_us < layer.latency_us < layer.high_us
    assert layer.latency_us > 2 * made.profile().layer(shape, backward=False).latency_us


def test_it_is_a_source_of_times_for_the_planner() -> None:
    profile = Profile.from_runs([made.run(made.gemm_records())], fit=False)
    times: OpTimes = profile
    rows = "profile of a100-sxm4-80gb: 22 gemm rows"
    assert times.note == rows
    product, attention = Gemm(2048, 6144, 2048, layout="nt"), Attention(1, 32, 1024, 1024, 128)
    found = times.estimates([product, attention, Softmax(64, 512, 512), product])
    assert found[0] == found[3]
    assert all(one.low_us <= one.latency_us <= one.high_us for one in found)
    assert found[0].latency_us == profile.gemm(2048, 6144, 2048).latency_us
    assert times.note == f"{rows}; of what was asked 2 modelled, 1 measured"
    beyond = [f"{name}: beyond the rows of the profile" for name in ("attention", "softmax")]
    assert [one.unmeasured for one in found] == ["", *beyond, ""]


def test_a_processor_without_models_answers_from_its_rows_and_usual_rates() -> None:
    spec = replace(made.A100, name="cpu-made", kind="cpu", peak_tflops={"fp32": 0.1}, compute_capability=None,
                   memory_gb_per_s=20.0, peak_clock_mhz={})  # fmt: skip
    gemms = [Gemm(256, n, 256, dtype="fp32") for n in (64, 128, 256, 512)]
    records = [made_runs.record(g, (5 + g.flops / 7e4,), {"n": g.n}) for g in gemms]
    profile = Profile.from_runs([made.run(records, device=spec)])
    assert profile.models.gemm == ()
    assert profile.gemm(256, 128, 256).source == "measured"
    between = profile.gemm(256, 192, 256)
    assert between.source == "interpolated"
    assert between.latency_us == pytest.approx(5 + gemms[0].flops * 3 / 7e4, rel=0.05)
    far = profile.gemm(4096, 4096, 4096)
    assert (far.source, far.outside) == ("modelled", True)
    assert far.note.startswith(
        "no model of products on cpu-made: from the rates of a usual core, good to a factor of four"
    )


def test_rows_are_found_whatever_their_number() -> None:
    rng = np.random.default_rng(2)
    sizes = tuple(np.unique(rng.integers(1, 50, (5000, 3)), axis=0).T)
    index = RowIndex(sizes)
    rows = rng.permutation(len(sizes[0]))
    assert np.array_equal(index.find(tuple(size[rows] for size in sizes)), rows)
    asked = tuple(rng.integers(1, 60, 2000) for _ in range(3))
    known = {key: row for row, key in enumerate(zip(*(s.tolist() for s in sizes), strict=True))}
    wanted = [known.get(key, -1) for key in zip(*(s.tolist() for s in asked), strict=True)]
    assert index.find(asked).tolist() == wanted
    assert RowIndex((np.zeros(0, dtype=np.int64),)).find((np.array([1]),)).tolist() == [-1]


def test_lines_go_through_sizes_that_grow_together() -> None:
    sizes = (np.array([8, 8, 8, 8]), np.array([300, 600, 100, 4000]), np.array([100, 200, 7, 100]))
    lines = Lines(sizes, np.array([1.0, 2.0, 5.0, 9.0]), ((0,), (1,), (2,), (1, 2)))
    known, value = lines.between(
        (np.array([8, 8, 8, 9]), np.array([450, 450, 600, 450]), np.array([150, 151, 200, 150]))
    )
    assert known.tolist() == [True, False, True, False]
    assert value[0] == pytest.approx(1 + np.log(1.5) / np.log(2))
    assert value[2] == 2.0
    # 300 and 4000 are more than a factor of two apart: nothing is between them.
    assert not lines.between((np.array([8]), np.array([1000]), np.array([100])))[0].any()


def test_lines_of_different_reach_are_kept_apart() -> None:
    """Three lines along the second size; a size below, between or above the rows of another line is
    not between.
    """
    sizes = (np.array([1, 1, 1, 2, 2, 3, 3]), np.array([10, 16, 20, 100, 180, 12, 24]))
    lines = Lines(sizes, np.arange(1.0, 8.0), ((1,),))
    asked = (np.array([1, 1, 2, 2, 3, 3, 3, 4]), np.array([18, 24, 15, 134, 10, 17, 134, 15]))
    known, value = lines.between(asked)
    assert np.flatnonzero(known).tolist() == [0, 3, 5]
    between = [(18, 16, 2.0, 20), (134, 100, 4.0, 180), (17, 12, 6.0, 24)]
    expected = [low_us + np.log(at / low) / np.log(high / low) for at, low, low_us, high in between]
    assert value[known] == pytest.approx(expected)


def test_each_row_is_predicted_from_its_neighbours_on_its_line() -> None:
    """The ends of a line have one neighbour only, and neighbours more than a factor of two apart
    tell nothing.
    """
    sizes = (
        np.array([1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4]),
        np.array([10, 14, 20, 8, 4, 5, 10, 14, 21, 10, 12]),
    )
    value = np.array([1.0, 9.0, 3.0, 7.0, 5.0, 9.0, 1.0, 9.0, 3.0, 1.0, 3.0])
    known, predicted = Lines(sizes, value, ((1,),)).left_out()
    assert np.flatnonzero(known).tolist() == [1, 5]
    assert predicted[1] == pytest.approx(1 + 2 * np.log(1.4) / np.log(2))
    assert predicted[5] == pytest.approx(5 + 2 * np.log(1.25) / np.log(2))


def test_a_row_on_two_lines_is_predicted_along_the_first_family() -> None:
    sizes = (np.array([10, 15, 20, 15, 15]), np.array([15, 15, 15, 10, 20]))
    lines = Lines(sizes, np.array([1.0, 0.0, 1.0, 5.0, 5.0]), ((0,), (1,)))
    assert lines.left_out()[1].tolist() == pytest.approx([0, 1, 0, 0, 0])


def surface(ratio: np.ndarray) -> Surface:
    """Rows at 64, 80, … whose times are these multiples of a model that says 10 µs, give or take 20
    %.
    """
    sizes = (np.arange(64, 64 + 16 * len(ratio), 16), np.full(len(ratio), 8))

    def model(asked: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
        ones = np.ones(len(asked[0]))
        return 10 * ones, 0.2 * ones, 0.2 * ones, 0 * ones

    us = 10 * ratio
    return Surface(sizes, us, us, us, model, ((0,),))  # type: ignore[arg-type]


def test_neighbours_that_tell_nothing_are_not_followed() -> None:
    """Every second row is twice as slow: what lies between its neighbours says the opposite of what
    it is.
    """
    found = surface(np.exp(np.resize([-0.5, 0.5], 21)))
    assert found.trust.share == 0.0
    latency, low, high, _, outside = found.many((np.array([72, 20]), np.array([8, 8])))
    assert latency[0] == pytest.approx(10 * np.exp(found.bias))
    assert np.log(high[0] / latency[0]) == pytest.approx(found.trust.half_width)
    assert found.trust.half_width >= 0.5
    assert outside.tolist() == [False, True]
    assert np.log(latency[1] / low[1]) == pytest.approx(1.5 * 0.2)


def test_neighbours_that_tell_all_are_followed() -> None:
    found = surface(np.exp(np.log(np.arange(64, 64 + 16 * 21, 16) / 200)))
    assert found.trust.share == pytest.approx(1.0, abs=1e-6)
    assert found.trust.half_width == 0.01
    assert found.many((np.array([72]), np.array([8])))[0][0] == pytest.approx(10 * 72 / 200)


def test_without_rows_the_model_answers_and_everything_is_outside() -> None:
    found = surface(np.zeros(0))
    latency, low, high, _, outside = found.many((np.array([1, 72]), np.array([8, 8])))
    assert found.range == ((1, 0), (1, 0))
    assert outside.tolist() == [True, True]
    assert latency.tolist() == [10.0, 10.0]
    for ratio in (high / latency, latency / low):
        assert np.log(ratio) == pytest.approx([1.5 * 0.2] * 2)
    # Few rows are followed with the model's interval.
    few = surface(np.exp(np.resize([-0.5, 0.5], 9))).trust
    assert (few.share, few.half_width) == (1.0, 0.2)
    assert surface(np.full(4, 3.0)).bias == 0.0
    assert surface(np.full(5, 3.0)).bias == pytest.approx(np.log(3))
