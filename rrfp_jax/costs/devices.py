"""Accelerators by name, the parts of their peaks that programs get, and the costs of layers on their rooflines.

Peaks are dense (no sparsity), in bfloat16. The memory of an NVIDIA GPU is the share of it that a run lets JAX take
(:data:`SHARE_OF_GPU`); that of a TPU is in decimal gigabytes, as its vendor prints it. Links are per device and
direction. To the host a GPU has PCIe: 4 x16 of A100 and L40S, 5 x16 of the others; of TPUs the vendor says nothing.

====================  =====================================================================================
A100                  NVIDIA A100 datasheet (SXM4): 312 TFLOP/s, 1555 GB/s with 40 GB and 2039 GB/s with 80 GB,
                      NVLink 600 GB/s both ways
H100, H200            NVIDIA H100 and H200 datasheets (SXM): half of the 1979 TFLOP/s that they print with sparsity;
                      3.35 and 4.8 TB/s, 80 and 141 GB, NVLink 900 GB/s both ways
B200                  figures for HGX B200 at 1000 W in the trade press: 2250 TFLOP/s, 8 TB/s, NVLink 1.8 TB/s both
                      ways. NVIDIA first spoke of 192 GB; systems report 180 GB, which counts here
L40S                  NVIDIA L40S datasheet: 362 TFLOP/s, 864 GB/s, 48 GB; no NVLink, PCIe 4 x16 64 GB/s both ways
TPU v4, v5e, v5p,     Cloud TPU documentation, a page for each: peaks, HBM, and the bandwidth between chips, here that
v6e                   of one of the chip's 6, 4, 6 and 4 ports one way. That of v4 is Jouppi et al. 2023 (ISCA)
====================  =====================================================================================

XLA compiles for a card that is not here from a description of it (:class:`Card`). Those are as CUDA reports them for
such a card, which OpenXLA publishes beside its compiler (``xla/backends/gpu/target_config/specs``).

Between hosts an adapter for each device is assumed: 200 Gbit/s for A100 and L40S, 400 Gbit/s for the newer ones. TPU
chips of a slice are joined alike across hosts.
"""

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rrfp_jax.costs.layer_costs import LayerCosts, LinkCosts
from rrfp_jax.costs.layer_sizes import LayerSizes
from rrfp_jax.field_rules import AT_LEAST_1, NOT_NEGATIVE, POSITIVE, FieldRule, check_fields

_SHARE = FieldRule("a number above 0 and at most 1", lambda value: 0 < value <= 1)
CUDA, TPU = "cuda", "tpu"
SHARE_OF_GPU = 0.92
"""The part of a GPU's memory that a run lets JAX take. NCCL's buffers, CUDA's context, the code of programs and cuDNN's
handles lie beside it: about 3 GiB of an H100 by others' reports, with some more to spare."""

_DESCRIPTION = """gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared_memory}
  threads_per_core_limit: 2048
  core_count: {cores}
  fpus_per_core: {fpus}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth}
  l2_cache_size: {l2_cache}
  clock_rate_ghz: {clock_ghz}
  device_memory_size: {num_bytes}
  shared_memory_per_block_optin: {shared_memory_of_block}
  cuda_compute_capability {{ major: {capability[0]} minor: {capability[1]} {features}}}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 12 minor: 9 }}
device_description_str: "{title}"
"""


@dataclass(frozen=True, kw_only=True)
class Card:
    """An NVIDIA GPU as XLA must know it to compile for it."""

    capability: tuple[int, int]
    """The compute capability."""
    cores: int
    """Number of streaming multiprocessors."""
    fpus: int = 128
    """Units for float32 of each of them."""
    shared_memory: int = 233_472
    """Bytes of shared memory of each of them."""
    l2_cache: int
    """Bytes of the second-level cache."""
    clock_ghz: float
    bandwidth: int
    """Bytes of memory per second."""
    num_bytes: int
    """Memory in bytes, as CUDA reports it."""

    def described(self, title: str) -> str:
        """Returns the text of the protocol buffer ``GpuTargetConfigProto``; ``title`` names the kind of device."""
        # Hopper's and Blackwell's own instructions are compiled for these cards alone, which the feature tells
        features = "feature_extension: ACCELERATED_FEATURES " if self.capability >= (9, 0) else ""
        return _DESCRIPTION.format(
            **vars(self), features=features, title=title, shared_memory_of_block=self.shared_memory - 1024
        )


@dataclass(frozen=True, kw_only=True)
class Device:
    """An accelerator. Raises ValueError for numbers that none has."""

    name: str
    title: str
    """Name for people."""
    kind: str
    """``cuda``, ``tpu``, or nothing for another."""
    flops: float
    """Operations per second in bfloat16, a multiply-add counting as two."""
    float32_flops: float
    """In float32 as JAX computes it by default: TF32 on NVIDIA GPUs, bfloat16 products on TPUs."""
    memory_gb_per_s: float
    num_bytes: int
    """Bytes of memory."""
    near_gb_per_s: float
    """To a device of the same host."""
    far_gb_per_s: float
    """To a device of another host."""
    host_gb_per_s: float | None = None
    """To memory of its host; None: not known."""
    per_host: int = 8
    """Devices that are near each other."""
    card: Card | None = None
    """The GPU in detail; None where programs are not compiled for it without it."""

    def __post_init__(self) -> None:
        check_fields(self, POSITIVE, "flops", "float32_flops", "memory_gb_per_s", "near_gb_per_s", "far_gb_per_s")
        check_fields(self, POSITIVE, "host_gb_per_s")
        check_fields(self, AT_LEAST_1, "num_bytes", "per_host")

    def rate_gb_per_s(self, num_devices: int) -> float:
        """Returns the bandwidth between ``num_devices`` devices, on the slowest link among them."""
        return self.near_gb_per_s if num_devices <= self.per_host else self.far_gb_per_s

    def links(self, num_devices: int, efficiencies: "Efficiencies") -> LinkCosts:
        """Returns the links between stages and between replicas of a run on ``num_devices`` devices."""
        return LinkCosts(
            latency_ms=efficiencies.hop_ms,
            gb_per_s=self.rate_gb_per_s(num_devices) * efficiencies.links,
            host_gb_per_s=None if self.host_gb_per_s is None else self.host_gb_per_s * efficiencies.links,
        )


@dataclass(frozen=True, kw_only=True)
class Efficiencies:
    """The parts of a device's peaks that programs get; the defaults are those that large products and streams commonly
    reach. Raises ValueError for numbers that are no such parts."""

    compute: float = 0.6
    memory: float = 0.8
    links: float = 0.8
    launch_ms: float = 0.05
    """Milliseconds that every task takes beside its computations."""
    hop_ms: float = 0.1
    """Milliseconds of every message between stages beside its bytes."""
    sum_ms: float = 0.02
    """Milliseconds of every sum over the devices that share a layer, beside its bytes."""

    def __post_init__(self) -> None:
        check_fields(self, _SHARE, "compute", "memory", "links")
        check_fields(self, NOT_NEGATIVE, "launch_ms", "hop_ms", "sum_ms")


def _gpu(
    name: str,
    title: str,
    *,
    tflops: float,
    tf32: float,
    tb_per_s: float,
    memory: int = 0,
    near: float,
    far: float,
    host: float,
    card: Card | None = None,
) -> Device:
    return Device(
        name=name,
        title=title,
        kind=CUDA,
        flops=tflops * 1e12,
        float32_flops=tf32 * 1e12,
        memory_gb_per_s=tb_per_s * 1e3,
        num_bytes=int((card.num_bytes if card else memory) * SHARE_OF_GPU),
        near_gb_per_s=near,
        far_gb_per_s=far,
        host_gb_per_s=host,
        card=card,
    )


def _tpu(version: str, *, tflops: float, gb_per_s: float, gb: int, link: float) -> Device:
    return Device(
        name=f"tpu-{version}",
        title=f"TPU {version}",
        kind=TPU,
        flops=tflops * 1e12,
        float32_flops=tflops * 1e12,
        memory_gb_per_s=gb_per_s,
        num_bytes=gb * 10**9,
        near_gb_per_s=link,
        far_gb_per_s=link,
    )


_A100 = Card(
    capability=(8, 0), cores=108, fpus=64, shared_memory=167_936, l2_cache=41_943_040, clock_ghz=1.41,
    bandwidth=2_039_040_000_000, num_bytes=85_100_068_864,
)  # fmt: skip
_A100_40 = replace(_A100, bandwidth=1_555_200_000_000, num_bytes=42_331_013_120)
_H100 = Card(
    capability=(9, 0), cores=132, l2_cache=52_428_800, clock_ghz=1.98, bandwidth=3_352_320_000_000,
    num_bytes=84_942_979_072,
)  # fmt: skip
_H200 = replace(_H100, bandwidth=4_800_000_000_000, num_bytes=151_397_597_184)
_B200 = Card(
    capability=(10, 0), cores=148, l2_cache=132_644_864, clock_ghz=1.965, bandwidth=7_672_320_000_000,
    num_bytes=191_514_411_008,
)  # fmt: skip

DEVICES = {
    each.name: each
    for each in (
        _gpu(
            "a100", "NVIDIA A100 80GB SXM", tflops=312, tf32=156, tb_per_s=2.039, near=300, far=25, host=32, card=_A100
        ),
        _gpu(
            "a100-40gb",
            "NVIDIA A100 40GB SXM",
            tflops=312,
            tf32=156,
            tb_per_s=1.555,
            near=300,
            far=25,
            host=32,
            card=_A100_40,
        ),
        _gpu("h100", "NVIDIA H100 SXM", tflops=989.4, tf32=494.7, tb_per_s=3.35, near=450, far=50, host=64, card=_H100),
        _gpu("h200", "NVIDIA H200 SXM", tflops=989.4, tf32=494.7, tb_per_s=4.8, near=450, far=50, host=64, card=_H200),
        _gpu("b200", "NVIDIA B200", tflops=2250, tf32=1100, tb_per_s=8.0, near=900, far=50, host=64, card=_B200),
        _gpu("l40s", "NVIDIA L40S", tflops=362, tf32=183, tb_per_s=0.864, memory=48 * 10**9, near=32, far=25, host=32),
        _tpu("v4", tflops=275, gb_per_s=1200, gb=32, link=50),
        _tpu("v5e", tflops=197, gb_per_s=819, gb=16, link=50),
        _tpu("v5p", tflops=459, gb_per_s=2765, gb=95, link=100),
        _tpu("v6e", tflops=918, gb_per_s=1638, gb=32, link=100),
    )
}
"""By the names that ``--device`` accepts."""
_ALIASES = {"a100-80gb": "a100", "v4": "tpu-v4", "v5e": "tpu-v5e", "v5p": "tpu-v5p", "v6e": "tpu-v6e"}


_KINDS = (
    ("a100-sxm4-40gb", "a100-40gb"),
    *((each, each) for each in ("a100", "h100", "h200", "b200", "l40s")),
    *(("v4", "tpu-v4"), ("v5 lite", "tpu-v5e"), ("v5e", "tpu-v5e"), ("v5", "tpu-v5p"), ("v6", "tpu-v6e")),
)
"""Parts of JAX's name for the kind of a device, and its record; the first that fits counts."""

_OTHER_PEAK = re.compile(r"\bMIG\b|\bG[HB]200\b|\bH[12]00 (PCIe|NVL)\b|v4 lite", re.IGNORECASE)
"""Parts of JAX's names for devices that compute slower or faster than the record of their name."""


def device_like(kind: str) -> Device | None:
    """Returns the record of a device by the name that JAX has for it (``device_kind``); None where there is none, as
    for a CPU."""
    names = [name for part, name in _KINDS if part in kind.lower()]
    return DEVICES[names[0]] if names else None


def peak_flops(kind: str) -> float | None:
    """Returns operations per second in bfloat16, dense, of a device of this kind; None where that is not known for
    sure, as of slower variants under the same name, and of parts of a device."""
    device = device_like(kind)
    return None if device is None or _OTHER_PEAK.search(kind) else device.flops


def device_of(name: str) -> Device:
    """Returns the device of a name; raises ValueError, with those that are known, for another."""
    word = name.strip().lower().replace(" ", "-").replace("_", "-")
    word = _ALIASES.get(word, word)
    if word in DEVICES:
        return DEVICES[word]
    near = difflib.get_close_matches(word, [*DEVICES, *_ALIASES], n=1)
    meant = f"did you mean {_ALIASES.get(near[0], near[0])}? " if near else ""
    raise ValueError(f"there is no device {name!r}: {meant}known are {', '.join(DEVICES)}")


# -- the roofline ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """A device on whose roofline the costs of layers are read (Williams et al. 2009).

    F, the input gradient and the weight gradient each take as long as their operations or their bytes, whichever is
    longer::

        t = max(operations / (peak * compute), bytes / (bandwidth * memory)) + sums

    Where ``n`` devices share a layer each of them computes a part, and sums of activations follow, as a ring does them:
    ``2 (n - 1) / n`` of the bytes over the link between them. Axes that cut rows, positions and parameters add the
    bytes that travel over each: parameters that programs gather, keys and values, tokens on their way to experts, and
    sums of gradients; nothing of it is held to overlap with computing. The time of launching belongs to the task.
    """

    device: Device
    efficiencies: Efficiencies
    tensor: int = 1
    """Devices that share every layer."""
    spans: Mapping[str, int] = field(default_factory=dict)
    """By axis of a stage's mesh, over how many neighbouring devices a group along it stretches."""
    is_float32: bool = False
    """Whether products are computed in float32 instead of bfloat16."""

    def __post_init__(self) -> None:
        check_fields(self, AT_LEAST_1, "tensor")

    @property
    def peak_flops(self) -> float:
        """Operations per second of one device."""
        return self.device.float32_flops if self.is_float32 else self.device.flops

    def task_ms(self, flops: float, moved_bytes: float) -> float:
        """Returns the milliseconds of a task with ``flops`` on all devices of the stage, and ``moved_bytes`` on
        each."""
        compute_s = flops / self.tensor / (self.peak_flops * self.efficiencies.compute)
        return max(compute_s * 1e3, moved_bytes / (self.device.memory_gb_per_s * self.efficiencies.memory) / 1e6)

    def costs(
        self,
        sizes: LayerSizes,
        *,
        fixed_bytes: int,
        param_bytes: int,
        num_moments: int = 2,
        on_host: bool = False,
        trains: bool = True,
        has_backward: bool = True,
    ) -> LayerCosts:
        """Returns the costs of a layer; ``param_bytes`` of each of its parameters, for which the optimizer has so many
        moments, maybe ``on_host``, from where each update brings them. Frozen ones are neither trained nor owed."""
        flops = sizes.tasks(trains=trains, has_backward=has_backward)
        runs = (True, has_backward, trains)
        task_ms = [
            self.task_ms(each / sizes.sharing, moved * does)
            for each, moved, does in zip(flops, sizes.moved_bytes, runs, strict=True)
        ]
        # Devices that share the layer sum up activations; other axes send what they cut.
        parts = self.efficiencies
        if self.tensor > 1:
            num_bytes = 2 * (self.tensor - 1) / self.tensor * sizes.sum_bytes
            rate = self.device.rate_gb_per_s(self.tensor) * parts.links
            for task, number in enumerate(sizes.sums):
                task_ms[task] += number * (num_bytes / rate / 1e6 + parts.sum_ms) * runs[task]
        for sent in sizes.sent:
            rate = self.device.rate_gb_per_s(self.spans.get(sent.axis, 1)) * parts.links
            for task, num_sent in enumerate(sent[1:]):
                task_ms[task] += (num_sent / rate / 1e6 + parts.sum_ms if num_sent else 0.0) * runs[task]
        # The optimizer reads and writes parameters, accumulators and moments once.
        updated = sizes.num_held * trains * 2 * ((1 + num_moments) * param_bytes + 4)
        update_ms = self.task_ms(0.0, updated)
        if on_host and (host_gb_per_s := self.device.host_gb_per_s) is not None:
            moved = sizes.num_held * trains * 2 * num_moments * param_bytes
            update_ms += moved / (host_gb_per_s * parts.links) / 1e6
        return LayerCosts(
            forward_ms=task_ms[0],
            input_gradient_ms=task_ms[1],
            weight_gradient_ms=task_ms[2],
            update_ms=update_ms,
            fixed_bytes=fixed_bytes,
            gradient_bytes=sizes.num_held * 4 * trains,
            stash_bytes=sizes.stash_bytes * has_backward,
            remade_bytes=sizes.remade_bytes * has_backward,
            owed_bytes=sizes.owed_bytes * trains,
            temporaries_bytes=sizes.temporaries_bytes,
            more_temporaries_bytes=sizes.more_temporaries_bytes * trains,
            output_bytes=sizes.output_bytes,
            flops=sum(sizes.flops.tasks(trains=trains, has_backward=has_backward)),
        )
