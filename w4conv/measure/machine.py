"""The machine that a measurement ran on, as reported by the operating system."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

from w4conv import __version__, cpus, kernels


@dataclass(frozen=True, slots=True)
class Machine:
    """allowed_cpus and allowed_cores: by affinity; quota_cpus: what cgroups grant, None without a limit. The default
    number of threads is the lesser of cores and quota. cache_nbytes: the last level. None: the system does not tell.
    """

    cpu: str
    cpus: int
    allowed_cpus: int
    allowed_cores: int
    quota_cpus: float | None
    cache_nbytes: int | None
    memory_nbytes: int | None
    system: str
    version: str
    build: str

    @property
    def allowed(self) -> str:
        """What this process may use, in words."""
        return str(cpus.AllowedCpus(self.allowed_cpus, self.allowed_cores, self.quota_cpus))

    @classmethod
    def here(cls) -> Machine:
        allowed = cpus.allowed_cpus()
        return cls(
            cpu=_cpu(),
            cpus=os.cpu_count() or allowed.cpus,
            allowed_cpus=allowed.cpus,
            allowed_cores=allowed.cores,
            quota_cpus=allowed.quota,
            cache_nbytes=_last_cache(),
            memory_nbytes=_memory("MemTotal"),
            system=f"{platform.system()} {platform.release()}",
            version=__version__,
            build=kernels.build_info(),
        )


def available_memory() -> int | None:
    """Bytes that could be resident now without swapping, the page cache included."""
    return _memory("MemAvailable")


def _cpu() -> str:
    found = re.findall(r"^(model name|cpu family|model)\s*: (.*)$", _text("/proc/cpuinfo"), re.MULTILINE)
    fields = dict(reversed(found))
    if "model name" not in fields:
        return platform.processor() or platform.machine()
    name = " ".join(fields["model name"].split())
    return f"{name}, family {fields['cpu family']}, model {fields['model']}" if "model" in fields else name


def _last_cache() -> int | None:
    folders = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"))
    sizes = [_text(str(folder / "size")).strip() for folder in folders]
    found = [int(size[:-1]) * 1024 for size in sizes if size.endswith("K")]
    return max(found, default=None)


def _memory(field: str) -> int | None:
    found = re.search(rf"^{field}:\s+(\d+) kB$", _text("/proc/meminfo"), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError):
        return ""
