"""Artifacts for the tests of the validate stage."""

import pytest


@pytest.fixture
def exported(tiny_model, home):
    """Export a model as the shared fixture does, tasks with past included."""
    from enginery import export_model

    def make(kind, task, **options):
        source = tiny_model(kind, task.removesuffix("-with-past"))
        return export_model(str(source), task=task, **options)

    return make
