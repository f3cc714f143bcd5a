"""What ``hisparse plan`` takes a GPU and its host to do: the one table of such figures.

The project has run on none of these GPUs. Each figure has its source; replace it by your own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Final, NamedTuple

from hisparse.errors import ConfigError

__all__ = ["GPUS", "HOSTS", "Figure", "Gpu", "Hardware", "Host", "find_hardware"]


class Figure(NamedTuple):
    """A figure and where it comes from."""

    value: float
    source: str


_REVIEW: Final = "our review of commit fddd878"
_REACHED: Final = (
    f"assumed to reach 0.9 of it, as FlashInfer's 3.0 of 3.35 TB/s on an H100 SXM in {_REVIEW}"
)
_LAUNCH: Final = Figure(
    2.0,
    "1.3 us between kernels of a CUDA graph on an H100 (Hazy Research, Look Ma, No Bubbles, 2025), "
    "and 0.7 us assumed for a small kernel itself",
)
_HOST_LAUNCH: Final = Figure(
    8.0,
    f"assumed: PyTorch's eager operators, 14 ms for 55 in each of 32 layers in {_REVIEW}",
)
_ATTENTION: Final = Figure(
    11.0,
    "FlashInfer and FlashAttention 3 take 12 to 17 us for one request of 1,024 to 4,096 tokens "
    "(vllm-project/flash-attention, pull request 63), less 2 us for the launch",
)
_CLOCK: Final = "1.755 GHz, the boost clock in NVIDIA's H100 PCIe product brief, assumed for all"


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU. Where two hosts are possible, its memory is that of the GPU on a PCIe host.

    Attributes:
        device_names: what the names that CUDA gives to it begin with.
        hosts: names of the hosts that it is sold with.
        hbm_gb_s: GB/s at which kernels read device memory.
        sm_ghz: clocks of all SMs in a second, in 1e9. An SM starts four instructions in a clock.
        launch_us: us from the start of a small kernel to that of the next one, which waits for it,
            within a CUDA graph.
        host_launch_us: us of host time for a kernel outside of a CUDA graph.
        attention_us: us of the smallest attention kernel, without the launch.
    """

    device_names: tuple[str, ...]
    hosts: tuple[str, ...]
    hbm_gb_s: Figure
    sm_ghz: Figure
    launch_us: Figure = _LAUNCH
    host_launch_us: Figure = _HOST_LAUNCH
    attention_us: Figure = _ATTENTION


@dataclass(frozen=True, kw_only=True)
class Host:
    """A host, and its link to one GPU.

    Attributes:
        read_gb_s: GB/s at which a kernel reads host memory.
        write_gb_s: GB/s at which a kernel writes host memory.
        copy_gb_s: GB/s at which a copy engine reads host memory.
        latency_us: us until the first bytes of a read arrive.
    """

    read_gb_s: Figure
    write_gb_s: Figure
    copy_gb_s: Figure
    latency_us: Figure


_NVBANDWIDTH = "nvbandwidth on H100 (NVIDIA/nvbandwidth, issue 24)"
_SUPERCHIP = "nvbandwidth on GH200 (NVIDIA/nvbandwidth, issue 23)"

GPUS: Final[Mapping[str, Gpu]] = MappingProxyType(
    {
        "h100": Gpu(
            device_names=("NVIDIA H100 80GB HBM3", "NVIDIA GH200 480GB"),
            hosts=("pcie5", "c2c"),
            hbm_gb_s=Figure(3000, f"NVIDIA H100 data sheet (SXM): 3.35 TB/s; {_REACHED}"),
            sm_ghz=Figure(132 * 1.755, f"NVIDIA H100 white paper: 132 SMs; {_CLOCK}"),
        ),
        "h100-pcie": Gpu(
            device_names=("NVIDIA H100 PCIe",),
            hosts=("pcie5",),
            hbm_gb_s=Figure(1800, f"NVIDIA H100 white paper (PCIe): 2.0 TB/s; {_REACHED}"),
            sm_ghz=Figure(114 * 1.755, f"NVIDIA H100 white paper: 114 SMs; {_CLOCK}"),
        ),
        "h200": Gpu(
            device_names=("NVIDIA H200", "NVIDIA GH200 144G"),
            hosts=("pcie5", "c2c"),
            hbm_gb_s=Figure(4320, f"NVIDIA H200 data sheet: 4.8 TB/s; {_REACHED}"),
            sm_ghz=Figure(132 * 1.755, f"the GH100 chip of the H100: 132 SMs; {_CLOCK}"),
        ),
        "b200": Gpu(
            device_names=("NVIDIA B200", "NVIDIA GB200"),
            hosts=("pcie5", "c2c"),
            hbm_gb_s=Figure(
                6900,
                f"7.67 TB/s by bus width and clock (pytorch/ao, pull request 4002); {_REACHED}",
            ),
            sm_ghz=Figure(148 * 1.755, f"148 SMs (pytorch/ao, pull request 4002); {_CLOCK}"),
        ),
    }
)

HOSTS: Final[Mapping[str, Host]] = MappingProxyType(
    {
        "pcie5": Host(
            read_gb_s=Figure(35.2, f"host_to_device_memcpy_sm, {_NVBANDWIDTH}"),
            write_gb_s=Figure(52.8, f"device_to_host_memcpy_sm, {_NVBANDWIDTH}"),
            copy_gb_s=Figure(
                55.6, "host_to_device_memcpy_ce in NVIDIA's blog post on nvbandwidth, 2025"
            ),
            latency_us=Figure(2.0, "assumed"),
        ),
        "c2c": Host(
            read_gb_s=Figure(342, f"host_to_device_memcpy_sm, {_SUPERCHIP}"),
            write_gb_s=Figure(
                297, "device to host over NVLink-C2C on GH200 (Schieffer et al., arXiv 2407.07850)"
            ),
            copy_gb_s=Figure(346, f"host_to_device_memcpy_ce, {_SUPERCHIP}"),
            latency_us=Figure(1.0, "assumed: half of PCIe's"),
        ),
    }
)


class Hardware(NamedTuple):
    """A GPU and its host."""

    gpu: Gpu
    host: Host

    @classmethod
    def named(cls, gpu: str, host: str) -> Hardware:
        """Look up a GPU and a host by their names.

        Raises:
            ConfigError: there is no such GPU or host, or the GPU is not sold with that host.
        """
        if gpu not in GPUS:
            raise ConfigError(f"--gpu: got {gpu!r}, expected {', '.join(GPUS)}")
        if host not in HOSTS:
            raise ConfigError(f"--host: got {host!r}, expected {', '.join(HOSTS)}")
        if host not in GPUS[gpu].hosts:
            others = ", ".join(name for name, other in GPUS.items() if host in other.hosts)
            raise ConfigError(
                f"--host: got {host} for {gpu}, expected {', '.join(GPUS[gpu].hosts)}; GPUs with "
                f"{host}: {others}"
            )
        return cls(GPUS[gpu], HOSTS[host])

    @property
    def figures(self) -> dict[str, Figure]:
        """All figures by name, those of the GPU first."""
        every = {f.name: getattr(part, f.name) for part in self for f in fields(part)}
        return {name: figure for name, figure in every.items() if isinstance(figure, Figure)}


def find_hardware(device_name: str) -> Hardware | None:
    """The GPU that CUDA calls ``device_name``, and its host; None: the table lacks it."""
    host = "c2c" if device_name.startswith(("NVIDIA GH", "NVIDIA GB")) else "pcie5"
    for name, gpu in GPUS.items():
        if device_name.startswith(gpu.device_names):
            return Hardware.named(name, host)
    return None
