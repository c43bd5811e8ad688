"""Attention's predicted time: tiles against hand-worked counts, recovery of a known truth, honest
intervals.
"""

import json
from dataclasses import replace

import numpy as np
import pytest

from quantbench.device import lookup
from quantbench.errors import InputError, UnsupportedError
from quantbench.latency.attention import FEWEST_ROWS, AttentionModel, shipped_slugs
from quantbench.latency.attention_cost_model import (
    FAMILIES,
    START,
    AttentionShapes,
    Physics,
    Terms,
    cut,
    peak_tflops,
)
from quantbench.latency.decode_cost_model import PARAMETERS, DecodeKernel, DecodePhysics
from quantbench.workload import Attention

A100, H200, V100 = (lookup(slug) for slug in ("a100-sxm4-80gb", "h200-sxm-141gb", "v100-sxm2-32gb"))


def causal(
    seq: int,
    *,
    batch: int = 1,
    heads: int = 1,
    kv_heads: int = 0,
    head_dim: int = 128,
    dtype: str = "fp16",
) -> Attention:
    return Attention(batch, heads, seq, seq, head_dim, kv_heads=kv_heads, dtype=dtype)


@pytest.mark.parametrize(
    ("family", "work", "rows", "keys", "longest"),
    [
        # 128-row blocks over 64 keys: the first block's queries see 128 keys (2 blocks), the
        # second's 256 (4).
        ("fa3_sm80", causal(256), 2, 6, 4),
        ("fa3_sm80", causal(256, batch=3, heads=4), 24, 72, 4),
        ("fa3_sm80", Attention(1, 1, 256, 256, 128, causal=False), 2, 8, 4),
        # 8 query heads share a key head: their 8 × 16 = 128 queries fill one block.
        ("fa3_sm80", causal(16, heads=16, kv_heads=2), 2, 2, 1),
        # FlashAttention-2 packs only a single query; 16 heads are 16 blocks otherwise.
        ("fa2_dense", causal(16, heads=16, kv_heads=2), 16, 16, 1),
        ("fa2_dense", Attention(1, 16, 1, 640, 128, kv_heads=2, causal=False), 2, 20, 10),
        # 192-row blocks, 128 keys: 400 queries are 3 blocks that see 192, 384 and 400 keys: 2 + 3 +
        # 4 key blocks.
        ("fa3_sm90", causal(400, head_dim=64), 3, 9, 4),
    ],
)
def test_blocks_by_hand(family: str, work: Attention, rows: int, keys: int, longest: int) -> None:
    blocks = cut(FAMILIES[family], AttentionShapes.of([work]))
    assert (blocks.rows[0], blocks.keys[0], blocks.longest[0]) == (rows, keys, longest)


def test_long_sequences_are_averaged_closely() -> None:
    # One sequence is counted block by block, the other averaged; row block i of 128 queries sees
    # i + 1 times two key blocks of 64.
    shapes = AttentionShapes.of([causal(64 * 128), causal(65 * 128)])
    keys = cut(FAMILIES["fa3_sm80"], shapes).keys.tolist()
    assert keys == pytest.approx([64 * 65, 65 * 66], rel=0.02)
    assert keys[0] == 64 * 65


def test_shapes_agree_with_the_workload() -> None:
    works = [
        causal(100, batch=2, heads=6, kv_heads=3, dtype="bf16"),
        Attention(1, 2, 7, 9, 64, causal=False, direction="backward"),
    ]
    shapes = AttentionShapes.of(works)
    assert shapes.flops.tolist() == [work.flops for work in works]
    assert shapes.min_bytes.tolist() == [work.min_bytes for work in works]
    with pytest.raises(InputError, match=r"dtypes \['bf16', 'fp16'\]; expected .* one dtype"):
        AttentionShapes.of([works[0], causal(8)])


def truth(family: str, rows: int, seed: int) -> tuple[AttentionShapes, np.ndarray]:
    """Shapes and times of a made-up device that runs `family`, with 2 % noise."""
    rng = np.random.default_rng(seed)
    works = []
    for _ in range(rows):
        kv_heads = int(2 ** rng.integers(0, 4))
        works.append(
            causal(
                int(2 ** rng.uniform(4, 13)), batch=int(2 ** rng.integers(0, 5)), kv_heads=kv_heads,
                heads=kv_heads * int(2 ** rng.integers(0, 4)), head_dim=int(rng.choice([64, 128, 256])),
            )
        )  # fmt: skip
    shapes = AttentionShapes.of(works)
    parameters = START + rng.normal(0, 0.2, len(START))
    cost = Physics(A100, FAMILIES[family], parameters).cost(shapes, np.zeros(rows, dtype=bool))
    return shapes, cost(parameters).latency_us * np.exp(rng.normal(0, 0.02, rows))


def held_out_error(model: AttentionModel, shapes: AttentionShapes, times: np.ndarray) -> float:
    """Median relative error; most of the times are in their intervals."""
    found = model.predict(shapes)
    assert np.mean((times >= found.low_us) & (times <= found.high_us)) > 0.8
    return float(np.median(np.abs(found.latency_us / times - 1)))


def read_back(model: AttentionModel) -> AttentionModel:
    return AttentionModel.from_json(json.loads(json.dumps(model.to_json())), model.device)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["fa3_sm80", "fa2_paged"])
def test_fit_recovers_the_kernel_family_and_the_times(family: str) -> None:
    shapes, times = truth(family, 300, seed=1)
    model = AttentionModel.fit(A100, shapes[:150], times[:150], prior="family-out")
    assert model.prefill.physics.family.name == family
    assert held_out_error(model, shapes[150:], times[150:]) < 0.03
    for name in ("latency_us", "high_us"):
        stored, made = (getattr(one.predict(shapes), name) for one in (read_back(model), model))
        assert stored == pytest.approx(made, rel=1e-3)


def test_broken_files_are_refused() -> None:
    data = AttentionModel.prior(A100).to_json()
    with pytest.raises(InputError, match=r"a model of a100-sxm4-80gb; expected one of h200"):
        AttentionModel.from_json(data, H200)
    with pytest.raises(InputError, match=r"version 2; expected quantbench-attention-model"):
        AttentionModel.from_json({**data, "version": 2}, A100)
    del data["prefill"]
    with pytest.raises(InputError, match=r"broken model \(KeyError\('prefill'\)\)"):
        AttentionModel.from_json(data, A100)


def test_decoding_is_fitted_to_its_own_rows() -> None:
    rng = np.random.default_rng(0)
    works = []
    for _ in range(160):
        kv_heads, group = (int(2 ** rng.integers(0, 4)) for _ in range(2))
        seq_k, batch = int(2 ** rng.integers(3, 16)), int(2 ** rng.integers(0, 8))
        works.append(Attention(batch, kv_heads * group, 1, seq_k, 128, kv_heads, causal=False))
    shapes = AttentionShapes.of(works)
    device = DecodePhysics.candidates(A100)[2]
    cost = device.cost(shapes, np.zeros(len(works), dtype=bool))
    times = cost(device.parameters + 0.2).latency_us * np.exp(rng.normal(0, 0.02, len(works)))
    model = AttentionModel.fit(A100, shapes[:100], times[:100])
    assert model.decode is not None
    assert not model.fitted
    assert held_out_error(model, shapes[100:], times[100:]) < 0.06
    stored, made = (one.predict(shapes).latency_us for one in (read_back(model), model))
    assert stored == pytest.approx(made, rel=1e-3)
    assert model.knows(works[0])
    assert not AttentionModel.best(V100).knows(works[0])


def decoded(
    kernel: DecodeKernel, batch: int, heads: int, seq_k: int, kv_heads: int, **changed: float
) -> Terms:
    """Costs a shape with head_dim 128 on an A100, with 0 for each parameter that is not given."""
    shapes = AttentionShapes.of([Attention(batch, heads, 1, seq_k, 128, kv_heads, causal=False)])
    parameters = np.array([changed.get(p.name, 0.0) for p in PARAMETERS])
    physics = DecodePhysics(A100, kernel, parameters)
    return physics.cost(shapes, np.zeros(1, dtype=bool))(parameters)


def test_a_sharp_join_of_decoding_does_not_overflow() -> None:
    found = decoded(DecodeKernel(64, 2, 256), 128, 64, 2**17, 8, log_join=7.0)
    longer_us = np.maximum(found.compute_us, found.memory_us)
    assert found.latency_us == pytest.approx(found.launch_us + longer_us, rel=1e-3)


@pytest.mark.parametrize(
    ("largest_group", "heads", "batch", "waves"),
    # 256 sequences on 108 SMs: 3 waves of 1 block each, 5 of 2 blocks, 152 of 64 blocks.
    [(0, 32, 256, 3), (0, 64, 256, 5), (32, 32, 256, 3), (32, 64, 256, 152), (0, 32, 1, 1)],
)
def test_decoding_by_hand(largest_group: int, heads: int, batch: int, waves: int) -> None:
    found = decoded(DecodeKernel(32, 1, 512, False, largest_group), batch, heads, 2**16, 1)
    assert found.waves[0] == waves
    # One sequence is cut into 108 parts, which take 1 µs each to join, and so does the launch.
    assert found.launch_us[0] == (110 if batch == 1 else 1)


def test_packed_queries_of_a_batch_are_copied() -> None:
    for batch, kv_heads, copy_us in ((1, 8, 0), (4, 1, 0), (4, 8, 1)):
        found = decoded(DecodeKernel(64, 2, 128, True), batch, 16, 64, kv_heads)
        assert found.launch_us[0] == 1 + copy_us


def test_keys_below_a_tile_take_the_time_of_a_tile() -> None:
    kernel = DecodeKernel(64, 1, 128)
    few, more = (decoded(kernel, 256, 32, keys, 8, log_tile_keys=5.0) for keys in (8, 64))
    assert few.compute_us == pytest.approx(more.compute_us, rel=0.05)


def test_a_backward_pass_is_no_faster_than_its_forward_pass() -> None:
    model = AttentionModel.best(lookup("h100-sxm5-80gb"))
    works = [causal(64 * i, dtype="bf16") for i in range(1, 31)]
    works += [replace(work, direction="backward") for work in works]
    times = model.predict(works).latency_us
    assert works[59].flops / times[59] == pytest.approx(works[29].flops / times[29])
    # Measured ones set the cost.
    times[30:] *= 1.2
    fitted = AttentionModel.fit(model.device, works, times)
    assert fitted.backward_cost == pytest.approx(3.0, rel=0.1)


def test_bad_rows_are_refused_and_few_leave_the_prior() -> None:
    works = [causal(128 * i) for i in range(1, 30)]
    for times, said in (
        ([float("nan")] * 29, "expected finite times"),
        ([1.0, 2.0], "for 29 shapes"),
    ):
        with pytest.raises(InputError, match=said):
            AttentionModel.fit(A100, works, times)
    few = AttentionModel.fit(A100, works[:3], [20.0, 30.0, 40.0])
    assert f"(3 rows are fewer than the {FEWEST_ROWS} a fit needs)" in few.note
    known = AttentionModel.prior(A100).predict(works[:1])[0]
    assert replace(few.predict(works[:1])[0], note=known.note) == known
    with pytest.raises(InputError, match=r"prior = 'mine'; expected one of auto, family-out"):
        AttentionModel.prior(A100, prior="mine")
    with pytest.raises(UnsupportedError, match="bf16 on v100-sxm2-32gb"):
        AttentionModel.best(V100).predict([causal(128, dtype="bf16")])


def test_shipped_models_say_where_they_come_from() -> None:
    assert shipped_slugs() == (
        "a100-sxm4-80gb", "b200-sxm-180gb", "h100-sxm5-80gb", "h200-sxm-141gb", "l40s-48gb"
    )  # fmt: skip
    for slug in shipped_slugs():
        provenance = AttentionModel.best(lookup(slug)).provenance
        assert provenance["held_out"]["median_pct"] < 6
        assert provenance["held_out_decode"]["median_pct"] < 7
        assert 0.85 < provenance["held_out"]["coverage"] < 0.95
        assert all("aiconfigurator-core" in source for source in provenance["tables"])


def test_h200_against_published_rows() -> None:
    # aiconfigurator-core 0.12.0, h200_sxm, vllm 0.24.0, context attention with 32 heads of 128 over
    # 8 key heads.
    rows = {(4, 1024): 120.7, (4, 4096): 1002.8, (1, 8192): 938.3, (16, 2048): 1205.1}
    works = [causal(seq, batch=batch, heads=32, kv_heads=8) for batch, seq in rows]
    predicted = AttentionModel.best(H200).predict(works, cache_write=True)
    assert predicted.latency_us == pytest.approx(list(rows.values()), rel=0.12)
    assert set(predicted.bound) == {"compute"}


def test_a_gpu_without_a_model_says_so_with_a_wide_interval() -> None:
    work = causal(2048, batch=4, heads=32)
    model = AttentionModel.best(V100)
    known = AttentionModel.best(H200)
    assert "nothing measured on it" in model.note
    blind, shipped = (one.predict([work])[0] for one in (model, known))
    assert blind.high_us / blind.low_us > 1.8
    assert shipped.high_us / shipped.low_us < 1.6
    beyond = replace(known, decode=None)
    decode = Attention(1, 32, 1, 4096, 128, causal=False)
    for far in (decode, replace(work, direction="backward"), replace(work, head_dim=150)):
        answer = beyond.predict([far])
        assert answer[0].high_us / answer[0].latency_us > 1.95
        assert "1 shape beyond what was measured" in answer.note


@pytest.mark.parametrize(
    "slug", ["v100-sxm2-32gb", "a100-sxm4-80gb", "h200-sxm-141gb", "b200-sxm-180gb"]
)
def test_never_above_the_peak_and_never_faster_for_more(slug: str) -> None:
    device = lookup(slug)
    model = AttentionModel.best(device)
    grid = [
        causal(seq, batch=batch, heads=heads, head_dim=head_dim)
        for batch in (1, 8)
        for heads in (1, 32)
        for head_dim in (64, 128)
        for seq in (128, 512, 2048, 8192, 32768)
    ]
    shapes = AttentionShapes.of(grid)
    predicted = model.predict(shapes)
    fastest_us = shapes.flops / peak_tflops(device, "fp16") / 1e6
    assert (predicted.low_us >= fastest_us * (1 - 1e-12)).all()
    assert (predicted.low_us <= predicted.latency_us).all()
    assert (predicted.latency_us <= predicted.high_us).all()
    assert (np.diff(predicted.latency_us.reshape(-1, 5), axis=1) > 0).all()


def test_heads_that_must_be_padded_pay_for_the_copies_in_full() -> None:
    model = AttentionModel.prior(A100)
    works = [Attention(1, 12, 2048, 2048, width) for width in (150, 152)]
    padded_us, aligned_us = model.predict(works).latency_us
    copied_us = 2 * 4 * 12 * 2048 * 150 * 2 / (A100.memory_gb_per_s * 1e3)
    assert padded_us > aligned_us + 0.9 * copied_us
