"""Runs collectives with torch.distributed: NCCL between GPUs, gloo between CPU processes.

`TorchRanks` connects the ranks, and `TorchWork` runs one rank's part of a collective; `quantbench
comm` measures with both. Commands and results use a separate gloo group, so that only the
collective itself runs on the links while it is timed. Each rank sends a known pattern, from which
the correct result follows.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from quantbench.device import gpu_index
from quantbench.device.spec import DeviceState
from quantbench.errors import InputError, UnsupportedError
from quantbench.timing.lockstep import OUT_OF_MEMORY, Command, RankBatch
from quantbench.units import counted
from quantbench.workload import Collective

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "int8": torch.int8}
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_TIMEOUT = timedelta(minutes=5)
# torch 2.13 renamed these functions and warns of the old names. The arguments are the same.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# Every rank sends whole numbers from 0 to _PATTERN − 1.
_PATTERN = 5
# Maximum number of ranks that send more than 0 for one element; the others send 0. A sum over all
# ranks is then at most 25 · 4 = 100. int8 and bf16 represent it and all partial sums exactly.
_MOST_ADDENDS = 25
# Number of elements that are filled or checked at a time. Indices and values are computed in 64
# bits, so each intermediate tensor for a whole bf16 message of 1 GiB would need 4 GiB.
_CHUNK_ELEMENTS = 2**22


def backend_here() -> str:
    """Returns the backend for this node: `nccl` with GPUs, else `gloo`.

    QUANTBENCH_DEVICE=cpu selects gloo. Raises UnsupportedError if this node has fewer GPUs than
    ranks, or if torch is built without NCCL.
    """
    if gpu_index() is None:
        return "gloo"
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    gpus = torch.cuda.device_count()
    expected = "--backend gloo to measure CPUs"
    if gpus < ranks:
        found = f"{counted(ranks, 'rank')} on this node, each of which sees {counted(gpus, 'GPU')}"
        raise UnsupportedError("comm", found, f"a GPU for each, or {expected}")
    if not dist.is_nccl_available():
        found = "this torch is built without NCCL"
        raise UnsupportedError("comm", found, f"another torch, or {expected}")
    return "nccl"


class TorchRanks:
    """Group of the ranks that torchrun started; implements `timing.lockstep.Ranks`.

    A group is used as a context manager. Every rank must call each method.

    backend: `nccl` or `gloo`.

    Raises InputError without torchrun or with a single rank, and UnsupportedError if the nodes have
    different numbers of ranks.
    """

    def __init__(self, backend: str) -> None:
        missing = [name for name in _TORCHRUN if name not in os.environ]
        if missing:
            expected = "torchrun --nproc-per-node=N -m quantbench comm …, on every node"
            raise InputError("comm", f"{missing[0]} is not set", expected)
        self.world_size = int(os.environ["WORLD_SIZE"])
        if self.world_size < 2:
            expected = "at least two: torchrun --nproc-per-node=2 or more"
            raise InputError("comm", "a single rank", expected)
        self.rank = int(os.environ["RANK"])
        per_node = int(os.environ["LOCAL_WORLD_SIZE"])
        if self.world_size % per_node:
            found = f"{self.world_size} ranks, {per_node} on this node"
            raise UnsupportedError("comm", found, "as many on every node")
        self.num_nodes = self.world_size // per_node
        self.backend = backend
        self.device = torch.device("cpu")
        if backend == "nccl":
            self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(self.device)
        else:
            torch.set_num_threads(1)

    def __enter__(self) -> TorchRanks:
        dist.init_process_group(self.backend, timeout=_TIMEOUT)
        self._control = dist.new_group(backend="gloo", timeout=_TIMEOUT)
        return self

    def __exit__(self, *_: object) -> None:
        dist.destroy_process_group()

    def broadcast(self, command: Command | None) -> Command | None:
        """Sends rank 0's command to all ranks, and returns it on every rank.

        command: the command on rank 0; None on the other ranks.
        """
        commands = [command]
        dist.broadcast_object_list(commands, src=0, group=self._control)
        return commands[0]

    def gather(self, value: object) -> list[object] | None:
        """Returns the values of all ranks, by rank, on rank 0; None on the other ranks."""
        gathered: list[object] | None = None
        if self.rank == 0:
            gathered = [None] * self.world_size
        dist.gather_object(value, gathered, dst=0, group=self._control)
        return gathered

    def barrier(self) -> None:
        """Waits until all ranks have called this method."""
        dist.barrier(group=self._control)


class TorchWork:
    """One rank's part of a collective: its buffers, call, check and timer.

    Implements `timing.lockstep.Work`.

    state: function that reads the state of this rank's GPU; default an empty state.
    """

    def __init__(self, ranks: TorchRanks, state: Callable[[], DeviceState] = DeviceState) -> None:
        self._ranks = ranks
        self._state = state
        self._release()

    def _release(self) -> None:
        """Frees the buffers of the last collective."""
        self._output = torch.zeros(0)
        self._run: Callable[[], object] = lambda: None
        self._fill: Callable[[], object] = lambda: None
        self._expected: Callable[[torch.Tensor], torch.Tensor] = lambda at: at

    def allocate(self, collective: Collective) -> str:
        """Allocates the buffers of a collective; returns "" or the reason why this failed."""
        self._release()
        dtype = _DTYPES.get(collective.dtype)
        if dtype is None:
            return f"torch.distributed reduces no {collective.dtype}: not supported"
        try:
            self._make(collective, dtype)
        except RuntimeError as error:
            # Only CUDA raises torch.OutOfMemoryError. The CPU allocator raises a plain RuntimeError
            # with this text.
            if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
                return OUT_OF_MEMORY + str(error).splitlines()[0]
            raise
        return ""

    def _make(self, collective: Collective, dtype: torch.dtype) -> None:
        """Allocates the buffers of a collective and defines its call and its expected result."""
        device = self._ranks.device
        world = self._ranks.world_size
        rank = self._ranks.rank
        count = collective.message_bytes // dtype.itemsize
        share = count // world
        op = collective.op

        def summed(at: torch.Tensor) -> torch.Tensor:
            total = torch.zeros_like(at)
            for each in range(world):
                total += _pattern(each, at, world)
            return total

        out = torch.zeros(share if op == "reduce_scatter" else count, dtype=dtype, device=device)
        sent = out
        if op not in ("all_reduce", "broadcast"):  # these two ops work in place
            sent = out.new_empty(share if op == "all_gather" else count)
        self._output = out
        self._fill = lambda: _fill_pattern(sent, rank, world)
        match op:
            case "all_reduce":
                self._run = lambda: dist.all_reduce(out)
                self._expected = summed
            case "broadcast":
                self._run = lambda: dist.broadcast(out, src=0)
                self._expected = lambda at: _pattern(0, at, world)
            case "all_gather":
                self._run = lambda: _all_gather(out, sent)
                self._expected = lambda at: _pattern(at // share, at % share, world)
            case "reduce_scatter":
                self._run = lambda: _reduce_scatter(out, sent)
                self._expected = lambda at: summed(rank * share + at)
            case "all_to_all":
                self._run = lambda: dist.all_to_all_single(out, sent)
                self._expected = lambda at: _pattern(at // share, rank * share + at % share, world)
            case _:
                ahead = (rank + 1) % world
                behind = (rank - 1) % world
                self._run = lambda: _exchange(sent, out, ahead, behind)
                self._expected = lambda at: _pattern(behind, at, world)
        self._fill()

    def check(self) -> str:
        """Runs the collective once and checks its result; returns "" or what is wrong."""
        self._fill()
        try:
            self._run()
            if self._ranks.device.type == "cuda":
                torch.cuda.synchronize()
        except (RuntimeError, ValueError) as error:
            # torch has no exception type for an op or dtype that a backend lacks: c10d
            # (Backend.hpp) raises a plain RuntimeError that says "does not support". gloo raises
            # the same type for a lost connection, so only the text distinguishes the two cases. A
            # lost connection ends the run. A DistError, which is a failure of NCCL, the network or
            # the store, ends the run too.
            text = str(error).strip()
            lacking = isinstance(error, NotImplementedError) or "support" in text.lower()
            if isinstance(error, dist.DistError) or not lacking:
                raise
            why = text.partition("\n")[0][:200] or "it says no more"
            return f"not supported by {self._ranks.backend}: {why}"
        output = self._output
        wrong = 0
        for at, found in _chunks(output):
            wrong += int((found != self._expected(at)).sum())
        if wrong:
            return f"{wrong} of {output.numel()} elements are wrong"
        return ""

    def sample(self, count: int, runs: int) -> RankBatch:
        """Waits for all ranks, and then takes `count` samples of `runs` runs each."""
        self._ranks.barrier()
        if self._ranks.backend == "nccl":
            return self._event_samples(count, runs)
        times = []
        for _ in range(count):
            start_ns = time.perf_counter_ns()
            for _ in range(runs):
                self._run()
            times.append((time.perf_counter_ns() - start_ns) / runs / 1e3)
        return RankBatch(tuple(times))

    def _event_samples(self, count: int, runs: int) -> RankBatch:
        """Takes samples as the times between two CUDA events on the current stream.

        torch synchronises this stream with NCCL's stream. The stream is not blocked while runs are
        queued. If the host needs longer to launch a run than the device to execute it, the sample
        is therefore the launch time. The batch states the shortest launch time of all samples; a
        longer one may include waiting for the device, because its queue was full.
        """
        pairs = []
        launches_us = []
        for _ in range(count):
            start = torch.cuda.Event(enable_timing=True)
            stop = torch.cuda.Event(enable_timing=True)
            start.record()
            start_ns = time.perf_counter_ns()
            for _ in range(runs):
                self._run()
            launches_us.append((time.perf_counter_ns() - start_ns) / runs / 1e3)
            stop.record()
            pairs.append((start, stop))
        state = self._state()
        torch.cuda.synchronize()
        samples_us = tuple(start.elapsed_time(stop) * 1e3 / runs for start, stop in pairs)
        return RankBatch(samples_us, min(launches_us), state)


def topology(ranks: TorchRanks) -> dict[str, object]:
    """Returns the number, host, device, GPU name and NCCL version of this rank."""
    found: dict[str, object] = {
        "rank": ranks.rank,
        "host": os.uname().nodename,
        "device": str(ranks.device),
    }
    if ranks.device.type == "cuda":
        found["gpu"] = torch.cuda.get_device_name(ranks.device)
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def _exchange(sent: torch.Tensor, received: torch.Tensor, ahead: int, behind: int) -> None:
    """Sends a tensor to the rank ahead and receives one from the rank behind."""
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, sent, ahead), dist.P2POp(dist.irecv, received, behind)]
    )
    for work in works:
        work.wait()


def _pattern(rank: int | torch.Tensor, at: torch.Tensor, world_size: int) -> torch.Tensor:
    """Returns the values that a rank sends for some elements of a collective.

    If there are more than _MOST_ADDENDS ranks, only every `stride`-th rank sends more than 0 for an
    element. Which ranks these are depends on the index of the element.

    rank: the sending rank, or one rank for each index.
    at: indices of the elements.
    """
    stride = -(-world_size // _MOST_ADDENDS)
    contributes = (at // _PATTERN + rank) % stride == 0
    return (at + rank) % _PATTERN * contributes


def _fill_pattern(tensor: torch.Tensor, rank: int, world_size: int) -> None:
    """Fills a vector with the values that a rank sends."""
    for at, part in _chunks(tensor):
        part.copy_(_pattern(rank, at, world_size))


def _chunks(tensor: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields consecutive parts of a vector, each as its indices and its elements."""
    for start in range(0, tensor.numel(), _CHUNK_ELEMENTS):
        part = tensor[start : start + _CHUNK_ELEMENTS]
        yield torch.arange(start, start + part.numel(), device=tensor.device), part
