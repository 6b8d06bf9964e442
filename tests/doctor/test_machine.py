"""Processor, memory and disk of this machine."""

import pytest

from enginery.doctor.machine import examine_machine, free_bytes


def test_this_machine_has_a_processor_memory_and_disk():
    found = examine_machine()
    assert found.cpu
    assert found.usable_cpus >= 1
    assert 0 < found.memory_available_bytes <= found.memory_total_bytes
    assert found.temporary_free_bytes > 0


def test_free_space_is_that_of_the_nearest_existing_directory(tmp_path):
    assert free_bytes(tmp_path / "not" / "yet") == pytest.approx(free_bytes(tmp_path), rel=0.05)
    assert free_bytes(tmp_path) > 0
