"""The commands store list, store prune and store path."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from enginery.cli.app import OUTPUT, Output, application
from enginery.core.errors import OptionError

store_app = App(
    name="store",
    help="Finished artifacts and engines, by what they were made from.",
    default_parameter=application.default_parameter,
)
application.command(store_app)


@store_app.command(name="list", help_epilogue="")
def list_store(*, output: Output = OUTPUT) -> None:
    """List the finished artifacts and engines, most recently used first."""
    from enginery.cli import render
    from enginery.core.store.store import Store

    console = output.console()
    entries = Store().entries()
    console.json(render.store_json(entries))
    console.table(str(Store().home), render.store_rows(entries))
    if not entries:
        console.line("The store is empty.")


@store_app.command(help_epilogue="")
def prune(
    *,
    max_size: str = "",
    everything: Annotated[bool, Parameter(name="--all", negative=())] = False,
    output: Output = OUTPUT,
) -> None:
    """Remove damaged entries and leftovers, then the least recently used down to a size.

    The size is that of artifacts and engines together; files that they share count once. What
    killed runs left in the temporary folder, and those of predict beside their outputs, is removed
    too; the finished parts from which they resume stay. So are logs older than 30 days. What
    enginery did not make is kept, and folders of the store that are links are not followed.

    Parameters
    ----------
    max_size
        How much to keep: 20GB, 512MiB.
    everything
        Keep nothing.
    """
    from enginery.cli import render
    from enginery.core.scratch import remove_temporary
    from enginery.core.store.store import Store
    from enginery.core.table import human_bytes
    from enginery.predict.journal import remove_leftovers
    from enginery.runtime.providers.options import parse_size

    if bool(max_size) == everything:
        number = "both" if everything else "neither"
        raise OptionError(
            f"store prune: found {number} of --max-size and --all, expected one.",
            do="Give the size to keep, --max-size 20GB, or remove everything with --all.",
        )
    console = output.console()
    try:
        max_size_bytes = 0 if everything else parse_size(max_size)
    except ValueError:
        max_size_bytes = -1
    if max_size_bytes < 0:
        raise OptionError(f"option 'max_size': found '{max_size}', expected a size such as 20GB.")
    store = Store()
    before = store.size_bytes()
    leftovers: list[Path] = []
    removed = store.prune(max_size_bytes=max_size_bytes, on_removed=leftovers.append)
    freed = before - store.size_bytes() + remove_leftovers(leftovers.append)
    freed += remove_temporary(leftovers.append)
    names = [str(path) for path in leftovers]
    console.json({"removed": render.store_json(removed), "leftovers": names, "freed_bytes": freed})
    console.table("Removed", render.store_rows(removed))
    for name in names:
        console.line(f"Removed {name}")
    for path in store.foreign():
        console.line(f"Kept {path}, because enginery is not known to have made it.")
    console.line(
        f"Freed {human_bytes(freed)}." if removed or freed or leftovers else "Nothing to remove."
    )


@store_app.command(help_epilogue="")
def path(*, output: Output = OUTPUT) -> None:
    """Print where the store is."""
    from enginery.core.store.store import Store

    console = output.console()
    console.json({"path": str(Store().home)})
    console.line(str(Store().home))
