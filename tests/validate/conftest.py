"""Artifacts for the tests of the validate stage."""

import pytest


@pytest.fixture
def exported(tiny_model, home):
    """`exported("gpt2", "text-generation-with-past")`: as the shared one, tasks with past too."""
    from enginery import export_model

    def make(kind, task, **options):
        source = tiny_model(kind, task.removesuffix("-with-past"))
        return export_model(str(source), task=task, **options)

    return make
