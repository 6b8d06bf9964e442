"""Print every figure beside its limit, or the functions of one route by file."""

import sys
import tempfile
from pathlib import Path

from tests.budget.figures import count_lines, read_limits
from tests.budget.routes import MODEL, by_module, trace_embed, trace_export


def trace_routes(folder):
    """Return the functions of each route; the served artifact is the one that is exported."""
    from enginery import export_model

    export = trace_export(folder)
    artifact = export_model(MODEL, out=Path(folder) / "served").path
    return {"export": export, "embed": trace_embed(artifact, folder)}


def figures(routes):
    """Yield a line for every figure."""
    limits = read_limits()
    for folder, lines in count_lines().items():
        yield f"{folder:12}{lines:7} lines, at most {limits['lines'][folder][-1]['lines']}"
    for name, functions in routes.items():
        limit, files = limits["routes"][name][-1], len(by_module(functions))
        yield f"{name:12}{len(functions):7} functions, at most {limit['functions']}"
        yield f"{'':12}{files:7} files, at most {limit['files']}"


def main(route=""):
    """Print the figures."""
    with tempfile.TemporaryDirectory() as folder:
        routes = trace_routes(folder)
    modules = by_module(routes[route]) if route else {}
    text = [f"{module}: {', '.join(names)}" for module, names in modules.items()]
    sys.stdout.write("\n".join(text or figures(routes)) + "\n")


main(*sys.argv[1:])
