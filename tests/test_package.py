"""The package as a user gets it."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_wheel_holds_every_package(tmp_path):
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, ROOT]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    sources = {"kivi_jax": "kivi_jax", "kernels": "kivi_jax/kernels", "models": "kivi_jax/models"}
    expected = {
        f"{target}/{path.relative_to(ROOT / source).as_posix()}"
        for source, target in sources.items()
        for path in (ROOT / source).rglob("*.py")
    }
    assert expected | {"kivi_jax/py.typed"} <= names
    assert not any(name.startswith(("tests", "bench")) for name in names)
    entry_points = next(name for name in names if name.endswith("entry_points.txt"))
    assert b"kivi-jax = kivi_jax.cli:main" in zipfile.ZipFile(wheel).read(entry_points)


def test_importing_touches_no_device():
    code = (
        "import kivi_jax, kivi_jax.cli, kivi_jax.kernels.xla\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge._backends, 'a backend was started'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("command", ["make demo", "make test"])
def test_readme_names_the_commands_that_the_makefile_has(command):
    assert command in (ROOT / "README.md").read_text()
    assert f"\n{command.split()[1]}:" in (ROOT / "Makefile").read_text()
