"""Compiles for TPUs on a machine that has none, and reads the static schedules back.

Needs the package `libtpu`. Import this before anything initializes jax's TPU plugin: the compiler takes its options
from the environment, once.
"""

import contextlib
import dataclasses
import os
import re
import tempfile
from pathlib import Path

_DUMPS = Path(tempfile.mkdtemp(prefix="tpu-schedules-"))
_COMPILER_OPTIONS = (
    f"--xla_jf_dump_to={_DUMPS}",
    "--xla_jf_dump_llo_text=true",
    "--xla_jf_dump_llo_pass_label_regex=final",
)
os.environ["LIBTPU_INIT_ARGS"] = " ".join((os.environ.get("LIBTPU_INIT_ARGS", ""), *_COMPILER_OPTIONS)).strip()
for _name, _value in {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",  # no look for a TPU that is not there
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # several test processes at a time
}.items():
    os.environ.setdefault(_name, _value)

import jax  # noqa: E402
from jax.experimental import topologies  # noqa: E402
from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding, use_abstract_mesh  # noqa: E402

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "7x": "tpu7x:2x2x1"}


@dataclasses.dataclass(frozen=True)
class Schedule:
    """The static schedule of a kernel.

    Attributes:
        bundles: VLIW bundles of the whole kernel, close to cycles where nothing loops or stalls.
        units: for each unit, the slots that are taken.
    """

    bundles: int
    units: dict[str, int]


def compile_for(generation: str, fn, *args, **jit_options) -> tuple[jax.stages.Compiled, dict[str, Schedule]]:
    """Compiles `fn(*args)` for one chip of a generation; `args` are arrays or `ShapeDtypeStruct`s.

    Returns:
        What was compiled, and the schedule of each Pallas kernel in it, by the kernel's name.

    Raises:
        Whatever the TPU's compiler raises, for an operation it has not, a tile it cannot lay out or too much memory.
    """
    device = topologies.get_topology_desc(TOPOLOGIES[generation], platform="tpu").devices[0]
    sharding = SingleDeviceSharding(device)
    args = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args)
    for path in _DUMPS.iterdir():
        path.unlink()
    with _lowering_for(device):
        lowered = jax.jit(fn, **jit_options).lower(*args)
    return lowered.compile(), _schedules()


@contextlib.contextmanager
def _lowering_for(device):
    """Some rules of Pallas read the ambient abstract device while lowering."""
    fields = dict(device_kind=device.device_kind, num_cores=1)
    if "platform" in {field.name for field in dataclasses.fields(AbstractDevice)}:
        fields["platform"] = "tpu"
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=AbstractDevice(**fields))):
        yield


def _schedules() -> dict[str, Schedule]:
    found = {}
    for path in sorted(_DUMPS.glob("*final_hlo-static-per-bundle-utilization.txt")):
        name = re.sub(r"^\d+-|(\.\d+)?-\d+-final_hlo.*$", "", path.name)
        lines = path.read_text().splitlines()
        head = next(n for n, line in enumerate(lines) if "VALU" in line)
        units = [unit.strip() for unit in lines[head].split(",")]
        rows = [[int(n) for n in line.split()] for line in lines[head + 3 :] if re.fullmatch(r"[\d ]+", line)]
        found[name] = Schedule(len(rows), {unit: sum(row[n] for row in rows) for n, unit in enumerate(units)})
    return found
