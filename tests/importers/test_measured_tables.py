"""Tables of NeuSight, DeepBench and aiter: their layouts, what their words mean here, and what is wrong in bad ones."""

import re
from collections import Counter
from csv import DictReader
from pathlib import Path

import numpy as np
import pytest

from quantbench.device import lookup
from quantbench.errors import InputError
from quantbench.importers import aiter, deepbench, neusight
from quantbench.importers.runs import Row, Rows, write_run
from quantbench.launch import Tile
from quantbench.quantization import cdiv
from quantbench.store.folder import read_run
from quantbench.store.record import Measured
from quantbench.workload import Gemm, Softmax

HERE = Path(__file__)
SAMPLE = HERE.parents[1] / "data" / "neusight_gemms.csv"
# Kept beside the checkout, not in it.
WHOLE = HERE.parents[3] / "shared" / "data"
needs_whole = pytest.mark.skipif(not WHOLE.exists(), reason="no ../shared beside the checkout")

SOFTMAX = (
    "OPName,Latency,Device,Kernel Name,Grid x,Grid y,Grid z,Block x,Block y,Block z,Kernels,B,H\n"
    "softmax,0.512,Tesla V100-PCIE-32GB,softmax_warp_forward,4096,1,1,128,1,1,;softmax_warp_forward,16384,1024\n"
    "ln,0.512,Tesla V100-PCIE-32GB,layer_norm,4096,1,1,128,1,1,;layer_norm,16384,1024\n"
    "softmax,0.512,NVIDIA L4,softmax_warp_forward,4096,1,1,128,1,1,;softmax_warp_forward,16384,1024\n"
)
PRINTED = (
    "               Running training benchmark \n"
    "                         Times\n"
    "----------------------------------------------------------------------------------------\n"
    "    m       n      k      a_t     b_t      precision        time (usec) \n"
    "   1760     16   1760      0      0         half                  38\n"
    "   1760   7133   1760      1      0         half                 900\n"
    "   1760     16   1760      0      0         half       Not Supported\n"
)
SHEET = (
    "gpu,dtype,M,N,K,a_transposed,b_transposed,time_ms\n"
    "v100-sxm2-16gb,fp16,1760,16,1760,N,N,0.038\n"
    "v100-sxm2-16gb,fp16,1760,7133,1760,T,N,0.900\n"
    "t4-16gb,fp16,1760,16,1760,N,N,0.100\n"
)
CK = "a8w8_blockscale_1x128x128_256x16x64x256_16x16_16x16_1x1_16x16x1_16x16x1_1x16x1x16_4_1x1_intrawave_v1"
BLOCKSCALE = (
    "gfx,cu_num,M,N,K,libtype,kernelId,splitK,us,kernelName,tflops,bw,errRatio\n"
    f"gfx942,304,16,1536,7168,ck,7,2,18.5,{CK},19.0,700.0,0.0\n"
    f"gfx942,80,16,1536,7168,ck,7,0,30.5,{CK},19.0,700.0,0.0\n"
    "gfx942,304,32,1536,7168,triton,0,0,20.5,triton,19.0,700.0,0.0\n"
)
BF16 = (
    "gfx,cu_num,M,N,K,bias,dtype,outdtype,scaleAB,bpreshuffle,libtype,solidx,splitK,us,kernelName,err_ratio,tflops,bw\n"
    "gfx950,256,64,256,5120,False,torch.bfloat16,torch.float32,False,False,asm,5,13,7.9,"
    "_ZN5aiter39bf16gemm_fp32bf16_tn_64x64_splitk_cleanE,0.0,21.19,417.92\n"
    "gfx950,256,512,256,5120,False,torch.bfloat16,torch.bfloat16,False,False,torch,0,0,17.9,native,0.0,21.19,417.92\n"
)


def written(tmp_path: Path, name: str, text: str) -> Path:
    file = tmp_path / name
    file.write_text(text, encoding="utf-8")
    return file


# --- NeuSight ------------------------------------------------------------------------------------------------------


def test_neusight_names_the_reduction_n_and_the_width_k() -> None:
    v100 = lookup("v100-pcie-32gb")
    found = neusight.read_rows(SAMPLE, v100)
    with SAMPLE.open(encoding="utf-8") as stream:
        theirs = [row for row in DictReader(stream) if row["Device"] == "Tesla V100-PCIE-32GB"]
    assert len(found.rows) == len(theirs)
    for ours, row in zip(found.rows, theirs, strict=True):
        batch, m, reduction, width = (int(row[name]) for name in ("B", "M", "N", "K"))
        layout = "nt" if row["OPName"] == "linear" else "nn"
        assert ours.workload == Gemm(m, width, reduction, batch=batch, dtype="fp32", layout=layout)
        assert (ours.provider, ours.latency_us) == ("torch", pytest.approx(1e3 * float(row["Latency"])))
    assert found.left_out["rows of t4-16gb"] > 0
    assert sum(found.left_out.values()) + len(theirs) == found.total


@pytest.mark.parametrize("gpu", ["v100-pcie-32gb", "t4-16gb", "p100-pcie-16gb", "a100-pcie-40gb"])
def test_neusight_launches_tell_tile_and_split(gpu: str) -> None:
    splits = Counter[bool]()
    for row in neusight.read_rows(SAMPLE, lookup(gpu)).rows:
        work, launch = row.workload, row.launch
        assert isinstance(work, Gemm)
        assert launch is not None
        assert launch.tile is not None
        tiles = cdiv(work.m, launch.tile.block_m) * cdiv(work.n, launch.tile.block_n)
        assert launch.num_blocks == tiles * work.batch * launch.tile.split_k
        splits[launch.tile.split_k > 1] += 1
    assert splits[True] > 0
    assert splits[False] > 0


def test_neusight_softmax(tmp_path: Path) -> None:
    found = neusight.read_rows(written(tmp_path, "softmax.csv", SOFTMAX), lookup("v100-pcie-32gb"))
    assert [(row.workload, row.latency_us) for row in found.rows] == [
        (Softmax(1, 16384, 1024, dtype="fp32", mask="none"), 512.0)
    ]
    assert found.left_out == {"op ln: no such workload here": 1, "rows of l4-24gb": 1}


def test_neusight_times_hold_the_launch_and_say_how_long(tmp_path: Path) -> None:
    # y = x·Wᵀ of 16×16×16 takes next to nothing: 12 rows of 50 to 61 µs are launches; the thirteenth is work.
    head = "OPName,Latency,Device,Kernel Name,Grid x,Grid y,Grid z,Block x,Block y,Block z,Kernels,B,M,N,K\n"
    tail = "Tesla V100-PCIE-32GB,volta_sgemm_128x64_tn,1,1,1,128,1,1,;volta_sgemm_128x64_tn,1"
    tiny = "".join(f"linear,{(50 + i) / 1e3},{tail},16,16,{16 + i}\n" for i in range(12))
    file = written(tmp_path, "linear.csv", head + tiny + f"linear,2.5,{tail},2048,2048,2048\n")
    v100 = lookup("v100-pcie-32gb")
    found = neusight.read_rows(file, v100)
    (note,) = neusight.origin_of(file, found, v100).notes
    assert "55.5 µs (linear)" in note
    assert "in 12 of 13 rows it is over half of the time" in note
    summary = write_run(tmp_path / "results", v100, neusight.origin_of(file, found, v100), found, units_are_right=True)
    assert note in summary.notes
    assert read_run(summary.folder).info.options["notes"] == [note]


@needs_whole
@pytest.mark.slow
def test_neusight_whole_table(tmp_path: Path) -> None:
    v100 = lookup("v100-pcie-32gb")
    file = WHOLE / "neusight_fp32.parquet"
    found = neusight.read_rows(file, v100)
    linear = [row for row in found.rows if row.place.op == "linear"]
    assert linear
    assert all(row.launch and row.launch.tile for row in linear)
    (note,) = neusight.origin_of(file, found, v100).notes
    floors = [float(part.split("µs")[0].split()[-1]) for part in note.split(",")[:3]]
    assert all(30 < us < 100 for us in floors)


# --- DeepBench -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "text"), [("v100.txt", PRINTED), ("v100.csv", SHEET)])
def test_deepbench_is_column_major(name: str, text: str, tmp_path: Path) -> None:
    found = deepbench.read_rows(written(tmp_path, name, text), lookup("v100-sxm2-16gb"))
    timed = [(row.workload, row.latency_us) for row in found.rows if row.has_time]
    assert timed == [
        (Gemm(16, 1760, 1760, dtype="fp16", layout="nn"), pytest.approx(38.0)),
        (Gemm(7133, 1760, 1760, dtype="fp16", layout="nt"), pytest.approx(900.0)),
    ]
    assert found.left_out == ({"rows of t4-16gb": 1} if name.endswith(".csv") else {})


@pytest.mark.parametrize(("a_t", "b_t"), [(0, 0), (1, 0), (0, 1)])
def test_deepbench_layouts_are_those_of_the_same_memory(a_t: int, b_t: int, tmp_path: Path) -> None:
    m, n, k = 4, 6, 5
    table = PRINTED.splitlines()[3] + f"\n{m} {n} {k} {a_t} {b_t} float 10\n"
    (row,) = deepbench.read_rows(written(tmp_path, "t.txt", table), lookup("v100-sxm2-16gb")).rows
    work = row.workload
    assert isinstance(work, Gemm)
    random = np.random.default_rng(0)
    a_memory, b_memory = random.normal(size=m * k), random.normal(size=k * n)
    a = a_memory.reshape((k, m) if a_t else (m, k), order="F")
    b = b_memory.reshape((n, k) if b_t else (k, n), order="F")
    theirs = (a.T if a_t else a) @ (b.T if b_t else b)
    # In ours, the first operand is the memory of their b, row by row.
    first = b_memory.reshape((work.m, work.k) if work.layout[0] == "n" else (work.k, work.m))
    second = a_memory.reshape((work.k, work.n) if work.layout[1] == "n" else (work.n, work.k))
    ours = (first if work.layout[0] == "n" else first.T) @ (second if work.layout[1] == "n" else second.T)
    assert np.allclose(ours.ravel(), theirs.ravel(order="F"))


def test_deepbench_sheet_with_a_dtype_from_outside(tmp_path: Path) -> None:
    sheet = "M,N,K,A Transpose,B Transpose,Time (msec)\n64,32,128,n,t,0.02\n"
    file = written(tmp_path, "s.csv", sheet)
    (row,) = deepbench.read_rows(file, lookup("t4"), dtype="fp32").rows
    assert (row.workload, row.latency_us) == (Gemm(32, 64, 128, dtype="fp32", layout="tn"), pytest.approx(20.0))
    with pytest.raises(InputError, match=r"s.csv states no dtype; expected --dtype fp32, or a column precision"):
        deepbench.read_rows(file, lookup("t4"))


# --- aiter ---------------------------------------------------------------------------------------------------------


def test_aiter_block_scaled_products(tmp_path: Path) -> None:
    file = written(tmp_path, "dsv3_a8w8_blockscale_tuned_gemm.csv", BLOCKSCALE)
    found = aiter.read_rows(file, lookup("mi300x"))
    tuned, chosen = found.rows
    assert tuned.workload == Gemm(16, 1536, 7168, dtype="fp8_block", layout="nt")
    assert (tuned.latency_us, tuned.provider) == (18.5, "aiter")
    assert tuned.launch is not None
    assert tuned.launch.tile == Tile(16, 64, block_k=256, split_k=4, num_warps=4)  # 2², four wavefronts
    assert chosen.launch is None  # Triton's name is no kernel's
    assert found.left_out == {"rows of a gfx942 with 80 compute units": 1}
    (note,) = aiter.origin_of(file, lookup("mi300x")).notes
    assert "best of a search" in note


def test_aiter_states_formats_in_columns_and_parts_in_assembly(tmp_path: Path) -> None:
    file = written(tmp_path, "tuned.csv", BF16)
    first, second = aiter.read_rows(file, lookup("mi355x")).rows
    assert first.workload == Gemm(64, 256, 5120, dtype="bf16", layout="nt")
    assert first.launch is not None
    assert first.launch.tile == Tile(64, 64, split_k=13)
    assert second.launch is None
    narrow = "gfx,cu_num,M,N,K,q_dtype_w,libtype,kernelId,splitK,us,kernelName\n" + "".join(
        f"gfx950,256,64,256,5120,{form},ck,0,0,9.0,x\n" for form in ("torch.float8_e4m3fn", "torch.int8")
    )
    rows = aiter.read_rows(written(tmp_path, "a8w8_bpreshuffle_tuned_gemm.csv", narrow), lookup("mi355x")).rows
    assert [row.workload.dtype for row in rows] == ["fp8", "int8"]


def test_aiter_formats_that_the_kernel_denies_are_left_out(tmp_path: Path) -> None:
    table = "cu_num,M,N,K,dtype,splitK,us,kernelName\n" + "".join(
        f"256,64,256,5120,mxfp4,0,9.0,{kernel}\n"
        for kernel in ("flydsl_bpreshuflle_32x64x512_F8_F8_B16_2x1x0x0x4_default", "a4w4_blockscale_256x64x128x128_v3")
    )
    found = aiter.read_rows(written(tmp_path, "t.csv", table), lookup("mi355x"))
    assert len(found.rows) == 1
    assert found.left_out == {"mxfp4 products whose kernel's name says fp8": 1}


@needs_whole
@pytest.mark.slow
@pytest.mark.parametrize("gpu", ["mi300x", "mi355x"])
def test_aiter_whole_table(gpu: str, tmp_path: Path) -> None:
    spec = lookup(gpu)
    file = WHOLE / "amd_tuned_gemms.parquet"
    found = aiter.read_rows(file, spec)
    summary = write_run(tmp_path, spec, aiter.origin_of(file, spec), found)
    assert summary.rows == found.total
    assert summary.rejected < summary.records / 100  # no format is faster than the card
    grades = {r.outcome.grade.letter for r in read_run(summary.folder).records if isinstance(r.outcome, Measured)}
    assert grades <= {"C", "D", "rejected"}


# --- bad tables ----------------------------------------------------------------------------------------------------


def in_units(found: Rows, factor: float) -> Rows:
    return Rows([Row(row.workload, row.latency_us * factor, row.provider, row.place) for row in found.rows])


def test_a_wrong_unit_is_refused(tmp_path: Path) -> None:
    v100 = lookup("v100-sxm2-16gb")
    file = written(tmp_path, "v100.csv", SHEET)
    found = deepbench.read_rows(file, v100)
    for factor in (1e3, 1e-3):
        with pytest.raises(InputError, match=r"expected times in the unit that was stated, or --units-are-right"):
            write_run(tmp_path / "r", v100, deepbench.origin_of(file, v100), in_units(found, factor))


@needs_whole
def test_times_of_a_faster_gpu_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "half.csv"
    lines = (WHOLE / "deepbench_v100.csv").read_text().splitlines()
    # The same table without its GPU, said to be a T4's, of half the peak.
    file.write_text("\n".join(line.partition(",")[2] for line in lines if "fp32" not in line) + "\n")
    t4 = lookup("t4")
    found = deepbench.read_rows(file, t4)
    fast = Rows([row for row in found.rows if isinstance(row.workload, Gemm) and row.workload.flops > 4e10])
    with pytest.raises(InputError, match=r"figures are above the peak of t4-16gb; expected times that it can reach"):
        write_run(tmp_path / "r", t4, deepbench.origin_of(file, t4), fast)


@pytest.mark.parametrize(
    ("read", "name", "text", "said"),
    [
        ("neusight", "t.csv", "M,N,K\n1,2,3\n", "t.csv has no column OPName or op: M, N, K; expected a table as"),
        (
            "neusight",
            "t.csv",
            SOFTMAX.replace("Tesla V100-PCIE-32GB", "Tesla T4"),
            "t.csv has no row of v100-pcie-32gb",
        ),
        ("neusight", "t.csv", SOFTMAX.replace(",H\n", ",W\n"), "t.csv has no column 'H'"),
        ("neusight", "t.csv", SOFTMAX.replace("16384,1024", "0,1024"), "line 2: Softmax: rows = 0"),
        ("deepbench", "t.csv", "M,N,K\n1,2,3\n", "t.csv has no column a_t: M, N, K; expected m, n, k"),
        ("deepbench", "t.csv", "m,n,k,a_t,b_t,precision\n1,2,3,n,n,half\n", "t.csv has no column time: m, n, k, a_t"),
        (
            "deepbench",
            "t.csv",
            "m,n,k,a_t,b_t,precision,time_us\n1,2,3,x,n,half,5\n",
            "column a_t = 'x'; expected t or n",
        ),
        ("deepbench", "t.txt", PRINTED.replace("half", "quad"), "dtype = 'quad'"),
        ("aiter", "t.csv", "M,N,K\n1,2,3\n", "t.csv has no column cu_num or compute_units: M, N, K"),
        ("aiter", "t.csv", BLOCKSCALE, "line 2: dtype ''; expected --dtype fp16"),
        ("aiter", "a8w8_x.csv", BLOCKSCALE.replace("304", "228"), "has no row of a gfx942 with 304 compute units"),
        ("aiter", "a8w8_x.csv", BLOCKSCALE.replace("18.5", "fast"), "column us = 'fast'; expected a number"),
    ],
)
def test_bad_tables_end_in_one_line(read: str, name: str, text: str, said: str, tmp_path: Path) -> None:
    file = written(tmp_path, name, text)
    reader, gpu = {
        "neusight": (neusight.read_rows, "v100-pcie-32gb"),
        "deepbench": (deepbench.read_rows, "v100-sxm2-16gb"),
        "aiter": (aiter.read_rows, "mi300x"),
    }[read]
    with pytest.raises(InputError) as caught:
        reader(file, lookup(gpu))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("gpu", "of_peak", "said"),
    [
        ("t4-16gb", 1.5, "12 of 40 figures are above the peak of t4-16gb"),
        ("h100-sxm5-80gb", 0.1, "large products take 7 times what they should on h100-sxm5-80gb (median)"),
    ],
)
def test_times_of_another_gpu_are_refused(tmp_path: Path, gpu: str, of_peak: float, said: str) -> None:
    spec = lookup(gpu)
    peak = spec.peak("fp16")
    assert peak is not None
    lines = ["M,N,K,a_t,b_t,precision,time_us"]
    for i in range(40):
        share = of_peak if of_peak < 1 or i < 12 else 0.5
        work = Gemm(4096, 4096 + 64 * i, 4096, dtype="fp16")
        lines.append(f"{work.n},{work.m},{work.k},n,n,half,{work.flops / peak / 1e6 / share:.3f}")
    path = tmp_path / "t.csv"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    rows = deepbench.read_rows(path, spec)
    with pytest.raises(InputError, match=re.escape(said)):
        write_run(tmp_path, spec, deepbench.origin_of(path, spec), rows)
