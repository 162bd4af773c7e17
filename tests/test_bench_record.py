"""Results of benchmarks on disk: what a later run keeps of an earlier one."""

import json
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "bench"))

from record import Record


def rows(path):
    return [(row["batch"], row["ms"]) for row in json.loads(path.read_text())["rows"]]


def test_a_run_goes_on_from_the_rows_of_the_same_device_and_versions(tmp_path):
    path = tmp_path / "results" / "rows.json"
    record = lambda device="A", version="1": Record(path, device, {"jax": version}, rows=("batch",))
    first = record()
    first.keep({"batch": 1, "ms": 5})
    first.keep({"batch": 2, "ms": 7})
    second = record()
    assert second.known() == {(1,), (2,)}
    second.keep({"batch": 1, "ms": 4})
    assert rows(path) == [(2, 7), (1, 4)]
    assert record("B").known() == record("A", "2").known() == set()
    assert rows(path) == [(2, 7), (1, 4)]  # until there is something to put in their place
