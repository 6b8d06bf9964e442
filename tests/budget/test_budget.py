"""The package stays as small as `budget.json` says; who makes it larger writes there why."""

import pytest

from tests.budget.figures import count_lines, read_limits
from tests.budget.routes import by_module, trace_embed, trace_export

LIMITS = read_limits()
SLACK = 100
"""Lines that a folder may have less than its limit; below that, the limit is to be lowered."""


@pytest.mark.parametrize(("folder", "lines"), count_lines().items())
def test_lines_of_folder_are_within_limit(folder, lines):
    limit = LIMITS["lines"][folder][-1]["lines"]
    slack = max(SLACK, limit // 50)
    assert limit - slack <= lines <= limit, "append the new limit and its reason to budget.json"


def test_every_limit_has_its_own_reason():
    for history in (*LIMITS["lines"].values(), *LIMITS["routes"].values()):
        reasons = [limit["reason"] for limit in history]
        assert all(len(reason) > 20 for reason in reasons)
        assert len(set(reasons)) == len(reasons)


def check_route(name, functions):
    limit = LIMITS["routes"][name][-1]
    modules = by_module(functions)
    assert len(functions) <= limit["functions"], modules
    assert len(modules) <= limit["files"], modules


@pytest.mark.more
def test_export_runs_few_functions(minilm, tmp_path):
    functions = trace_export(tmp_path)
    assert ("export/stage.py", "run") in functions
    assert any(module == "export/worker.py" for module, _ in functions), "the child is missing"
    check_route("export", functions)


def test_embed_runs_few_functions(exported, tmp_path):
    functions = trace_embed(exported("bert", "feature-extraction").path, tmp_path)
    assert ("serve/api/tei.py", "embed") in functions
    check_route("embed", functions)
