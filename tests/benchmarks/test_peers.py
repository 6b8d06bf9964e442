"""The comparison with other libraries: its tables, and environments that cannot be made."""

import json

import numpy as np
import pytest

from benchmarks.peers import environments
from benchmarks.peers.contenders import BASELINE, LIBRARIES, SERVERS, Environment
from benchmarks.peers.environments import UnavailableError, make_environment
from benchmarks.peers.report import compare, draw, library_table, server_table

OURS = LIBRARIES[-1].name


def figures(rate, cosine=1.0):
    return {
        "rate": rate,
        "memory_mib": 100.0,
        "boot": 1.0,
        "mean_cosine": cosine,
        "least_cosine": cosine - 0.1,
    }


def row_of(lines, name):
    (row,) = [line for line in lines if line.startswith(f"| {name} |")]
    return [cell.strip() for cell in row.strip("|").split("|")]


def test_ratio_is_that_within_a_round():
    rounds = [
        {BASELINE: figures(100.0), OURS: figures(300.0)},
        {BASELINE: figures(10.0), OURS: figures(50.0)},
    ]
    cells = row_of(library_table(rounds, LIBRARIES, BASELINE), OURS)
    assert cells[2:4] == ["175 (50–300)", "4.00 (3.00–5.00)"]


def test_a_library_whose_embeddings_are_others_is_marked():
    rounds = [{BASELINE: figures(1.0), OURS: figures(9.0, cosine=0.98)}]
    lines = library_table(rounds, LIBRARIES, BASELINE)
    assert row_of(lines, OURS)[6] == "0.98000 **below 0.99**"
    assert row_of(lines, BASELINE)[6] == "1.00000"


def test_without_the_baseline_there_is_no_ratio():
    assert row_of(library_table([{OURS: figures(1.0)}], LIBRARIES, BASELINE), OURS)[3] == "–"


def test_failed_requests_are_told_beside_the_servers_name():
    load = {"rate": 5.0, "p50": 1.0, "p99": 2.0, "refused": 0, "broken": 3}
    found = {**figures(0.0), "closed": {"8": load}}
    lines = server_table([{SERVERS[0].name: found}], SERVERS, [8], SERVERS[0].name)
    assert f"| {SERVERS[0].name} (3 requests failed) |" in lines[-1]


def test_cosine_does_not_depend_on_the_length_of_the_vectors():
    reference = np.eye(3, dtype=np.float32)
    found = compare(reference * 7, reference)
    assert found == {"mean_cosine": 1.0, "least_cosine": 1.0}
    turned = compare(np.roll(reference, 1, axis=0), reference)
    assert turned == {"mean_cosine": 0.0, "least_cosine": 0.0}


def test_the_figure_has_every_contender(tmp_path):
    draw("rows/s", {BASELINE: [1.0, 2.0], OURS: [3.0]}, tmp_path / "figure.svg")
    text = (tmp_path / "figure.svg").read_text()
    assert f">{BASELINE}<" in text
    assert f">{OURS}<" in text


@pytest.mark.more
def test_an_environment_that_cannot_be_made_says_why(tmp_path):
    missing = Environment("missing", (("--no-index", "no-such-package-anywhere"),))
    with pytest.raises(UnavailableError, match="No matching distribution found for no-such"):
        make_environment(missing, tmp_path)


def test_an_environment_with_the_same_packages_is_used_again(tmp_path, monkeypatch):
    made = Environment("made", (("numpy",),))
    place = tmp_path / "environments/made"
    place.mkdir(parents=True)
    (place / "packages.json").write_text(json.dumps(made.steps))
    monkeypatch.setattr(environments, "_run", lambda command: pytest.fail(f"ran {command}"))
    assert make_environment(made, tmp_path) == place / "bin/python"
