"""Compiles for an NVIDIA H200 on a machine without a GPU, and reads back what the kernels use.

`data/h200_target_config.txtpb` describes the device, as jaxlib itself printed it on one.
"""

import dataclasses
import importlib.util
import pathlib
import re
import sys

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding, use_abstract_mesh

TARGET = pathlib.Path(__file__).parent / "data" / "h200_target_config.txtpb"


def why_not() -> str | None:
    """Why nothing can be compiled here; None where it can."""
    if sys.version_info < (3, 12) or jax.__version_info__ < (0, 11):
        return "needs jax 0.11 on Python 3.12 or newer"
    if importlib.util.find_spec("jax_plugins") is None or importlib.util.find_spec("jax_plugins.xla_cuda13") is None:
        return "needs the CUDA plugin of jax: pip install jax[cuda13]"
    return None


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What ptxas says of a kernel: registers of a thread, and bytes of them that it spilled to memory."""

    name: str
    registers: int
    spilled: int


def compile_for_h200(function, arguments, dump: pathlib.Path, monkeypatch, **jit_options):
    """(executable, its Pallas kernels) of `function` for arguments of which only shapes and dtypes count.

    dump: an empty folder for the compiler's notes.
    """
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(dump))
    sharding = SingleDeviceSharding(topology("1x1x1").devices[0])
    arguments = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments)
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
        compiled = jax.jit(function, **jit_options).lower(*arguments).compile()
    return compiled, [_read(note) for note in sorted(dump.glob("*.ptxas"))]


def topology(shape: str):
    """Devices to compile for: `shape` as "1x2x1", hosts and GPUs of each."""
    return topologies.get_topology_desc(platform="cuda", target_config=TARGET.read_text(), topology=shape)


def _read(note: pathlib.Path) -> Kernel:
    text = note.read_text()
    spills = re.findall(r"(\d+) bytes spill", text)
    return Kernel(note.stem, int(re.search(r"Used (\d+) registers", text)[1]), sum(map(int, spills)))
