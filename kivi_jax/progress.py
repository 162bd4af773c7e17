"""A progress bar for generating."""

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextlib.contextmanager
def reporting(progress: bool | Callable[[int, int], None], total: int) -> Iterator[Callable[[int], None] | None]:
    """Gives what `Run.advance` reports its tokens to: None for False, `progress(done, total)` for a function, and for
    True a bar in the terminal (standard error) while the context lasts."""
    if callable(progress):
        yield lambda done: progress(done, total)
    elif not progress:
        yield None
    else:
        columns = (
            TextColumn("generating"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("tokens"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task("", total=total)
            yield lambda done: bar.update(task, completed=done)
