"""A file of results that grows row by row: a run that ends early loses nothing, and the next goes on from there."""

import datetime
import json
from pathlib import Path


class Record:
    """`{"device", "versions", "date", "rows": [...]}` in a file; each row with its own date.

    Args:
        path: the file; rows that it has are kept if they are of the same device and versions, else it begins anew with
            the first row.
        device, versions: what is measured on.
        identity: for each list of rows, the fields that say what a row is of; a newer row takes an older one's place.
    """

    def __init__(self, path: Path, device: str, versions: dict[str, str], **identity: tuple[str, ...]):
        self.path, self._identity = path, identity
        self.content = {"device": device, "versions": versions, "date": None} | {name: [] for name in identity}
        if path.exists():
            saved = json.loads(path.read_text())
            if all(saved[name] == self.content[name] for name in ("device", "versions")):
                self.content |= saved

    def known(self, name: str = "rows") -> set[tuple]:
        """What the rows of list `name` are of."""
        return {self._key(row, name) for row in self.content[name]}

    def keep(self, row: dict, name: str = "rows") -> None:
        """Puts a row, with today's date, into list `name` and the file."""
        date = datetime.date.today().isoformat()
        others = [x for x in self.content[name] if self._key(x, name) != self._key(row, name)]
        self.content |= {"date": date, name: [*others, row | {"date": date}]}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(self.content, indent=1) + "\n")
        print(row, flush=True)

    def _key(self, row: dict, name: str) -> tuple:
        return tuple(row[field] for field in self._identity[name])
