"""Counters of the CPU and its memory controllers through perf_event_open(2), where the kernel offers them.

Virtual machines and strict settings (kernel.perf_event_paranoid) often offer none; nothing is counted then.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

# linux/perf_event.h
_SYSCALL: Final = {"x86_64": 298, "aarch64": 241}
_HARDWARE, _SOFTWARE = 0, 1
_ATTRIBUTE_NBYTES: Final = 112  # PERF_ATTR_SIZE_VER5
_INHERIT, _EXCLUDE_KERNEL, _EXCLUDE_HYPERVISOR = 1 << 1, 1 << 5, 1 << 6
_TIMES: Final = 1 | 2  # read_format: time enabled, time running
_CLOSE_ON_EXEC: Final = 8
_EVENTS: Final = {
    "cycles": (_HARDWARE, 0),
    "instructions": (_HARDWARE, 1),
    "cache_misses": (_HARDWARE, 3),  # of the last level
    "page_faults": (_SOFTWARE, 2),
}
_DEVICES: Final = Path("/sys/bus/event_source/devices")


class _Counter(NamedTuple):
    fd: int
    scale: float  # of the memory controllers, to bytes


class Counters:
    """Counts from now on, of this thread, the threads it will start, and of the memory controllers of the machine.

    So make it before a model's threads. Names: cycles, instructions, cache_misses, page_faults; memory_read and
    memory_write in bytes, of all programs. Names that the kernel does not offer are absent.
    """

    def __init__(self) -> None:
        self._counters: dict[str, list[_Counter]] = {}
        for name, (kind, config) in _EVENTS.items():
            for flags in (_INHERIT, _INHERIT | _EXCLUDE_KERNEL | _EXCLUDE_HYPERVISOR):
                if (fd := _open(kind, config, flags, pid=0, cpu=-1)) is not None:
                    self._counters[name] = [_Counter(fd, 1)]
                    break
        for event in memory_events(_DEVICES):
            if (fd := _open(event.kind, event.config, 0, pid=-1, cpu=event.cpu)) is not None:
                self._counters.setdefault(event.name, []).append(_Counter(fd, event.nbytes))

    def read(self) -> dict[str, float]:
        """Totals since the beginning, by name."""
        return {name: sum(map(_value, counters)) for name, counters in self._counters.items()}

    def close(self) -> None:
        for counters in self._counters.values():
            for counter in counters:
                os.close(counter.fd)
        self._counters = {}


def difference(after: Mapping[str, float], before: Mapping[str, float]) -> dict[str, float]:
    return {name: after[name] - before[name] for name in after}


class MemoryEvent(NamedTuple):
    """A counter of one memory controller. nbytes: that one count stands for."""

    name: str
    kind: int
    config: int
    cpu: int
    nbytes: float


def memory_events(devices: Path) -> Iterator[MemoryEvent]:
    """The events that controllers under /sys/bus/event_source/devices name cas_count_read and cas_count_write."""
    for device in sorted(devices.glob("uncore_imc*")):
        for name, event in (("memory_read", "cas_count_read"), ("memory_write", "cas_count_write")):
            try:
                terms = (device / "events" / event).read_text().strip()
                kind = int((device / "type").read_text())
                cpus = (device / "cpumask").read_text().strip().split(",")
                scale, unit = _text(device / "events" / f"{event}.scale"), _text(device / "events" / f"{event}.unit")
                config = _config(device / "format", terms)
            except (OSError, ValueError):
                continue
            nbytes = float(scale or 1) * (2**20 if unit == "MiB" else 64)
            for cpu in cpus:
                yield MemoryEvent(name, kind, config, int(cpu.split("-")[0]), nbytes)


def _config(formats: Path, terms: str) -> int:
    """ "event=0x04,umask=0x03" in the bits that the device's format files say. Raises ValueError beyond `config`."""
    config = 0
    for term in terms.split(","):
        name, _, value = term.partition("=")
        place, _, bits = (formats / name).read_text().strip().partition(":")
        if place != "config":
            raise ValueError(place)
        config |= int(value or "1", 0) << int(bits.split("-")[0].split(",")[0])
    return config


def _text(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""


def _open(kind: int, config: int, flags: int, *, pid: int, cpu: int) -> int | None:
    number = _SYSCALL.get(platform.machine())
    if platform.system() != "Linux" or number is None:
        return None
    # struct perf_event_attr: type, size, config, sample_period, sample_type, read_format, flags, and zeros
    attribute = struct.pack("=IIQQQQQ", kind, _ATTRIBUTE_NBYTES, config, 0, 0, _TIMES, flags)
    buffer = ctypes.create_string_buffer(attribute, _ATTRIBUTE_NBYTES)
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long
    arguments = (ctypes.c_long(number), buffer, *map(ctypes.c_long, (pid, cpu, -1, _CLOSE_ON_EXEC)))
    fd = int(syscall(*arguments))
    return fd if fd >= 0 else None


def _value(counter: _Counter) -> float:
    """Scaled up where events were multiplexed: more were asked for than the CPU has counters."""
    count, enabled, running = struct.unpack("=QQQ", os.read(counter.fd, 24))
    return float(count * counter.scale * (enabled / running if running else 0))
