"""A machine in numbers: what a decode step can be predicted from.

Presets state what makers state; ``sustained`` is the part of it that predictions count on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

GIB = 2**30

# 16 lanes of 16 (32) GT/s with 128 of 130 bits used: PCI-SIG base specification 4.0 (5.0).
PCIE_4, PCIE_5 = 31.5e9, 63.0e9


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """One device and its host. Rates are per second, times in seconds, sizes in bytes.

    Attributes:
        hbm: bytes of device memory that move.
        tensor: bfloat16 operations of the tensor cores, dense, summed in float32.
        vector: float32 operations outside them.
        pcie: bytes from DRAM to HBM; pcie_latency: of one transfer.
        memory: bytes of device memory there are.
        source: of the figures above.
        gather: bytes of pages that one host worker puts together; gather_latency: beside them, of
            one gather; workers: how many there are.
        miss_list: from the end of select until the host has the ids.
        dispatch: of one compiled function, on the engine's thread.
        dram: bytes of host memory; host_bandwidth: its bytes; host_operations: float32 operations
            of the host's CPUs.
        ssd: bytes read from SSD; ssd_latency: of one read.

    Raises:
        ValueError: rates and sizes that are not positive and finite, times below 0.
    """

    name: str
    hbm: float
    tensor: float
    vector: float
    pcie: float
    memory: int
    source: str
    pcie_latency: float = 10e-6
    gather: float = 6e9
    gather_latency: float = 50e-6
    workers: int = 2
    miss_list: float = 20e-6
    dispatch: float = 20e-6
    dram: int = 128 * 10**9
    host_bandwidth: float = 200e9
    host_operations: float = 2e12
    ssd: float = 6.5e9
    ssd_latency: float = 100e-6

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, str):
                continue
            least = 0.0 if field.name in TIMES else math.ulp(0.0)
            if not (math.isfinite(value) and value >= least):
                expected = "a time of at least 0" if field.name in TIMES else "positive"
                raise ValueError(f"{field.name} of {self.name} must be {expected}, got {value!r}")


TIMES = ("pcie_latency", "gather_latency", "miss_list", "dispatch", "ssd_latency")

SUSTAINED = {
    "hbm": 0.8,
    "tensor": 0.7,
    "vector": 0.7,
    "pcie": 0.8,
    "ssd": 0.9,
    "host_bandwidth": 0.8,
    "host_operations": 0.7,
}
"""Assumed share of each peak that programs of this kind reach; not measured here."""


def sustained(hardware: Hardware) -> Hardware:
    """The hardware with what is assumed to be reached in place of peaks."""
    reached = {name: share * getattr(hardware, name) for name, share in SUSTAINED.items()}
    return replace(hardware, **reached)


# Hosts: DRAM of L20, H20 and RTX 4090 as in the paper, section 9; host bandwidth from channels and
# speed of the processor's memory; the other figures of the host are assumed, see docs/plan.md.
HARDWARE = {
    "a100": Hardware(
        name="A100 SXM 80GB", hbm=2039e9, tensor=312e12, vector=19.5e12, pcie=PCIE_4,
        memory=80 * GIB, dram=256 * 10**9, host_bandwidth=205e9,
        source="NVIDIA A100 Tensor Core GPU datasheet, 2021",
    ),
    "l20": Hardware(
        name="L20", hbm=864e9, tensor=119.5e12, vector=59.8e12, pcie=PCIE_4,
        memory=48 * GIB, dram=100 * 10**9, host_bandwidth=307e9,
        source="NVIDIA L20 datasheet, 2023",
    ),
    "rtx4090": Hardware(
        name="RTX 4090", hbm=1008e9, tensor=165.2e12, vector=82.6e12, pcie=PCIE_4,
        memory=24 * GIB, dram=120 * 10**9, host_bandwidth=282e9,
        source="NVIDIA Ada GPU architecture whitepaper, appendix A (float32 accumulation)",
    ),
    "h20": Hardware(
        name="H20", hbm=4000e9, tensor=148e12, vector=44e12, pcie=PCIE_5,
        memory=96 * GIB, dram=200 * 10**9, host_bandwidth=461e9,
        source="NVIDIA HGX H20 product brief, 2024",
    ),
    "h100": Hardware(
        name="H100 SXM", hbm=3352e9, tensor=989.4e12, vector=66.9e12, pcie=PCIE_5,
        memory=80 * GIB, dram=256 * 10**9, host_bandwidth=307e9,
        source="NVIDIA H100 Tensor Core GPU architecture whitepaper, table 3",
    ),
    "h200": Hardware(
        name="H200 SXM", hbm=4800e9, tensor=989.4e12, vector=66.9e12, pcie=PCIE_5,
        memory=141 * GIB, dram=256 * 10**9, host_bandwidth=307e9,
        source="NVIDIA H200 Tensor Core GPU datasheet, 2024",
    ),
}  # fmt: skip
"""By the names of the compile targets."""


def hardware(name: str) -> Hardware:
    """A preset; ValueError, with the choices, for an unknown name."""
    if name not in HARDWARE:
        raise ValueError(f"hardware must be one of {', '.join(HARDWARE)}, got {name!r}")
    return HARDWARE[name]
