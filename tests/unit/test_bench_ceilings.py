"""What bench stands on: dot products from registers, counters of the kernel, CPUs that may be used, an idle pool."""

from __future__ import annotations

import os
import resource
import struct
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from helpers import make_llama_dir

from w4conv import cpus, kernels
from w4conv.commands.quantize import quantize
from w4conv.cpus import AllowedCpus
from w4conv.measure import counters
from w4conv.measure.counters import Counters, MemoryEvent, memory_events
from w4conv.runtime.engine import Model


@pytest.mark.parametrize("tier", kernels.isa_tiers())
def test_every_multiplication_from_registers_is_counted(monkeypatch: pytest.MonkeyPatch, tier: str) -> None:
    monkeypatch.setenv("W4CONV_ISA", tier)
    lanes = {"scalar": 4, "avx2": 8, "avxvnni": 8}.get(tier, 16)
    chains = 12 if lanes == 16 else 6
    one = kernels.multiply_registers(operands="int16", threads=1)
    assert one == 64 * 100000 * chains * lanes * 2  # tasks, rounds, and pairs of int16
    assert kernels.multiply_registers(operands="int16", threads=2) == 2 * one
    assert kernels.multiply_registers(operands="int8", threads=1) == 4 * one  # eight bytes a step


def test_page_faults_of_threads_are_counted() -> None:
    counters = Counters()
    try:
        before = counters.read()
        if "page_faults" not in before:
            pytest.skip("this kernel offers no counters to this user")
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        thread = threading.Thread(target=lambda: np.ones(1 << 20).sum())
        thread.start()
        thread.join()
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults
        assert counters.read()["page_faults"] - before["page_faults"] == pytest.approx(faults, abs=20)
        assert faults > 0
    finally:
        counters.close()
    assert counters.read() == {}


def test_memory_controllers_are_found_as_sysfs_describes_them(tmp_path: Path) -> None:
    files = {
        "uncore_imc_1/type": "23\n",
        "uncore_imc_1/cpumask": "0,28\n",
        "uncore_imc_1/format/event": "config:0-7\n",
        "uncore_imc_1/format/umask": "config:8-15\n",
        "uncore_imc_1/events/cas_count_read": "event=0x04,umask=0x03\n",
        "uncore_imc_1/events/cas_count_read.scale": "6.103515625e-5\n",
        "uncore_imc_1/events/cas_count_read.unit": "MiB\n",
        "uncore_imc_2/type": "24\n",  # names no events
        "uncore_cha_0/type": "25\n",  # no memory controller
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = list(memory_events(tmp_path))
    assert found == [MemoryEvent("memory_read", 23, 0x0304, cpu, 64.0) for cpu in (0, 28)]


def test_counts_are_scaled_where_events_were_multiplexed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where the kernel itself may not be counted, as often on virtual machines; and with two memory controllers."""
    opened: list[int] = []

    def fake_open(kind: int, config: int, flags: int, *, pid: int, cpu: int) -> int | None:
        assert (pid, cpu) in {(0, -1), (-1, 0), (-1, 28)}
        if pid == 0 and not flags & counters._EXCLUDE_KERNEL:
            return None
        path = tmp_path / str(len(opened))
        path.write_bytes(struct.pack("=QQQ", 3, 10, 0 if config == 1 else 5))  # count, time enabled, time counted
        opened.append(os.open(path, os.O_RDONLY))
        return opened[-1]

    events = [MemoryEvent("memory_read", 23, 0x0304, cpu, 64.0) for cpu in (0, 28)]
    monkeypatch.setattr(counters, "_open", fake_open)
    monkeypatch.setattr(counters, "memory_events", lambda _: events)
    counted = Counters()
    assert counted.read() == {
        "cycles": 6, "instructions": 0, "cache_misses": 6, "page_faults": 6, "memory_read": 2 * 6 * 64,
    }  # fmt: skip
    counted.close()
    assert len(opened) == 6
    for fd in opened:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


@pytest.mark.parametrize(
    ("allowed", "default", "most"),
    [
        (AllowedCpus(8, 8, None), 8, 8),
        (AllowedCpus(8, 4, None), 4, 8),  # two threads a core
        (AllowedCpus(8, 4, 6.0), 4, 6),
        (AllowedCpus(8, 8, 2.5), 2, 3),
        (AllowedCpus(8, 8, 0.5), 1, 1),
        (AllowedCpus(2, 2, 16.0), 2, 2),
    ],
)
def test_threads_follow_cores_and_quota(allowed: AllowedCpus, default: int, most: int) -> None:
    assert (allowed.default_threads, allowed.most_threads) == (default, most)


def test_cores_are_counted_once(tmp_path: Path) -> None:
    for cpu, siblings in enumerate(("0,2", "1,3", "0,2", "1,3")):
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{siblings}\n")
    assert cpus._cores(tmp_path, {0, 1, 2, 3}) == 2
    assert cpus._cores(tmp_path, {0, 2}) == 1
    assert cpus._cores(tmp_path, {0, 7, 8}) == 3


def test_an_idle_pool_burns_nothing() -> None:
    data = np.zeros(1 << 24, np.uint8)
    kernels.read(data, threads=2)
    time.sleep(0.1)  # workers wait for the next job for a moment
    used = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - used < 0.25, "a spinning worker would have used 0.5 s of CPU time"


def test_parts_add_up_to_the_forward_pass(tmp_path: Path) -> None:
    quantize(make_llama_dir(tmp_path / "in"), tmp_path / "m.w4", group_size=32, effort=0, scheme="w4a16")
    with Model(tmp_path / "m.w4", threads=1) as model:
        session = model.session()
        session.append(list(range(40)))
        assert not any(model.part_seconds().values()), "nobody asked"
        model.restart_stopwatch()
        start = time.perf_counter()
        session.append(list(range(100)))
        outside = time.perf_counter() - start
        parts = model.part_seconds()
        assert list(parts) == ["linear", "attention", "head", "rest"]
        assert all(seconds > 0 for seconds in parts.values())
        assert sum(parts.values()) <= outside
        model.restart_stopwatch()
        assert not any(model.part_seconds().values())
