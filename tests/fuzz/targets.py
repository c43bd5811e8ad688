"""Every loader of a file that comes from outside, as a function of bytes, with whole files to start
from.

A loader must end in a valid object or in one of quantbench's own errors, whatever the bytes are.
"""

import gzip
import io
import json
import lzma
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jsonschema
import made_runs
from foreign_texts import FALCON_7B, GEMMA_3_12B, LLAMA_3_70B, MS_LINE, S_LINE
from foreign_texts import log_line as line

from quantbench.importers import aiconfigurator, csv_table, megatron_log
from quantbench.latency.gemm.model import GemmModel
from quantbench.planner.calibration import Calibrations, shipped
from quantbench.planner.rows import read_table
from quantbench.profile import file as profile_file
from quantbench.profile.profile import Profile
from quantbench.store.folder import read_run
from quantbench.store.record import Failed, Skipped, record_to_json
from quantbench.store.run import write_run_info
from quantbench.store.schema import schema
from quantbench.store.typed import encode
from quantbench.sweep.axes import Held
from quantbench.sweep.messages import Reply, reply_from_json
from quantbench.sweep.options import SweepOptions, options_from_json, options_to_json, plan_sweep
from quantbench.sweep.shape_file import read_shape_file, read_shapes
from quantbench.workload import Attention, Gemm, Softmax
from quantbench.workload.huggingface import describe

ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True)
class Target:
    """load: from the file's bytes and a folder to put them in. seeds: whole files. kind: `json`,
    `jsonl`, `text` or `binary`, for damage that fits. sealed: puts a seal on damaged JSON that the
    loader would refuse otherwise."""

    name: str
    load: Callable[[bytes, Path], object]
    seeds: Callable[[], tuple[bytes, ...]]
    kind: str
    sealed: Callable[[Any], Any] = lambda data: data


@cache
def made_run() -> tuple[bytes, bytes]:
    """run.json and records.jsonl of a run with every kind of record."""
    works = (Gemm(128, 256, 64), Softmax(8, 128, 128), Attention(1, 8, 128, 128, 64))
    timed = [
        made_runs.record(w, made_runs.samples(10.0, noise=0.01, count=8, seed=1), {"n": 64})
        for w in works
    ]
    other = [
        made_runs.record(works[0], Skipped("fp8 needs a GPU"), {"n": 64}),
        made_runs.record(works[0], Failed("timeout", "no answer"), {"n": 64}),
        made_runs.reference(50.0, 3.0),
    ]
    with TemporaryDirectory() as folder:
        made = made_runs.run([*timed, *other], options=options_to_json(OPTIONS))
        written = made_runs.write(Path(folder), made)
        return (written / "run.json").read_bytes(), (written / "records.jsonl").read_bytes()


OPTIONS = SweepOptions(dims=("n=64:128:64",), held=Held(m=64, k=64), shard=(1, 2))


@cache
def _validator(name: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(schema(name))


def _load_run(info: bytes, records: bytes, folder: Path) -> object:
    (folder / "run.json").write_bytes(info)
    (folder / "records.jsonl").write_bytes(records)
    read = read_run(folder)
    for record in read.records:
        written = json.loads(json.dumps(record_to_json(record), allow_nan=False))
        _validator("record").validate(written)
    write_run_info(folder, read.info)
    _validator("run").validate(json.loads((folder / "run.json").read_text()))
    return read


def _at(folder: Path, name: str, content: bytes) -> Path:
    (folder / name).write_bytes(content)
    return folder / name


def _options(content: bytes, folder: Path) -> object:
    options = options_from_json(_json(content))
    plan_sweep(options, made_runs.SPEC)
    return options


def _json(content: bytes) -> Any:
    """As whoever calls these loaders parses; what is no JSON is not theirs to refuse."""
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        return None


@cache
def _aiconfigurator() -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = {
        "gemm_dtype": ["bfloat16", "fp8"], "m": [128, 256], "n": [4096, 4096], "k": [1024, 1024],
        "latency": [0.05, 0.07], "kernel_source": ["torch_flow", "torch_flow"], "framework": ["VLLM", "VLLM"],
    }  # fmt: skip
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue()


def _read_aiconfigurator(content: bytes, folder: Path) -> object:
    path = _at(folder, "gemm_perf.parquet", content)
    return aiconfigurator.read_rows(
        aiconfigurator.TableFile("gemm", path, "a100_sxm", "vllm", "1", "aic 0")
    )


@cache
def _profile() -> bytes:
    works = [Gemm(1024, n, 1024, dtype="bf16") for n in range(1024, 1536, 64)]
    records = [
        made_runs.record(
            w, made_runs.samples(10.0 + w.n / 100, noise=0.01, count=8, seed=w.n), {"n": w.n}
        )
        for w in works
    ]
    spec = replace(made_runs.SPEC, name="a100-test", source={})
    with TemporaryDirectory() as folder:
        written = made_runs.write(Path(folder), made_runs.run(records, device=spec))
        path = Path(folder) / "profile.json"
        Profile.from_runs([read_run(written)], fit=False).save(path)
        return path.read_bytes()


def _sealed_profile(data: Any) -> Any:
    if isinstance(data, dict):
        try:
            return {**data, "sha256": profile_file.digest(data)}
        except (ValueError, RecursionError):
            return data
    return data


CSV_MAP = csv_table.parse_map("m=M,n=N,k=K,latency=time:ms")
CSV = b"M,N,K,time,name\n128,256,512,0.25,k1\n129,256,512,0.5,\n"
LONG_CSV = CSV + CSV.partition(b"\n")[2] * 20
LOG = "\n".join((MS_LINE, S_LINE, *(line(n) for n in range(3, 9)))).encode()
SHAPES = b"name,m,n,k,batch\na,64,96,64,2\nb,8,8,8,1\n"
SHAPES_JSON = b"""{"format": "quantbench-shapes", "version": 1, "shapes": [
  {"name": "now", "shape": {"hidden": 64, "heads": 4, "layers": 2, "vocab": 96}},
  {"name": "wider", "shape": {"hidden": 96, "heads": 6}, "predicted": {"mid": 0.1, "low": 0.0, "high": 0.2}}]}"""


def _csv(name: str) -> Callable[[bytes, Path], object]:
    return lambda b, d: csv_table.read_rows(_at(d, name, b), CSV_MAP, dtype="bf16")


TARGETS = (
    Target("run.json", lambda b, d: _load_run(b, made_run()[1], d), lambda: made_run()[:1], "json"),
    Target(
        "records.jsonl",
        lambda b, d: _load_run(made_run()[0], b, d),
        lambda: made_run()[1:],
        "jsonl",
    ),
    Target("options", _options, lambda: (json.dumps(options_to_json(OPTIONS)).encode(),), "json"),
    Target(
        "worker-reply",
        lambda b, d: reply_from_json(_json(b)),
        lambda: (
            json.dumps(encode(Reply(measurement=made_runs.measurement([10.0] * 8)))).encode(),
        ),
        "json",
    ),
    Target(
        "csv",
        _csv("t.csv"),
        lambda: (CSV,),
        "text",
    ),
    Target(
        "csv.gz",
        _csv("t.csv.gz"),
        lambda: (gzip.compress(LONG_CSV),),
        "binary",
    ),
    Target(
        "csv.xz",
        _csv("t.csv.xz"),
        lambda: (lzma.compress(LONG_CSV),),
        "binary",
    ),
    Target("aiconfigurator.parquet", _read_aiconfigurator, lambda: (_aiconfigurator(),), "binary"),
    Target(
        "megatron-log",
        lambda b, d: megatron_log.read_log(_at(d, "t.log", b)),
        lambda: (LOG,),
        "text",
    ),
    Target(
        "megatron-log.gz",
        lambda b, d: megatron_log.read_log(_at(d, "t.log.gz", b)),
        lambda: (gzip.compress(LOG),),
        "binary",
    ),
    Target(
        "huggingface-config",
        lambda b, d: describe(_at(d, "config.json", b)).shape.ops(),
        lambda: tuple(json.dumps(c).encode() for c in (LLAMA_3_70B, FALCON_7B, GEMMA_3_12B)),
        "json",
    ),
    Target("shapes", lambda b, d: read_shapes(_at(d, "t.csv", b)), lambda: (SHAPES,), "text"),
    Target(
        "shapes.json",
        lambda b, d: read_shape_file(_at(d, "t.json", b)),
        lambda: (SHAPES_JSON,),
        "json",
    ),
    Target(
        "layouts",
        lambda b, d: read_table(_at(d, "t.csv", b)),
        lambda: (
            b"".join((ROOT / "tests/data/bloom_tables.csv").read_bytes().splitlines(True)[:4]),
        ),
        "text",
    ),
    Target(
        "gemm-model",
        lambda b, d: GemmModel.load(_at(d, "a.gemm", b)),
        lambda: (GemmModel.prior("a100-sxm4-80gb").to_bytes(),),
        "binary",
    ),
    Target(
        "planner-calibration",
        lambda b, d: Calibrations.from_json(_json(b)),
        lambda: (json.dumps(shipped().to_json()).encode(),),
        "json",
    ),
    Target(
        "profile",
        lambda b, d: Profile.load(_at(d, "p.json", b)),
        lambda: (_profile(),),
        "json",
        _sealed_profile,
    ),
)
