"""The best plane at each pixel, beside torch's interpolation."""

import numpy as np
import pytest
import torch

from enginery.runtime.image import planes as module
from enginery.runtime.image.planes import best_planes, count_at_least, scale_plane

SIZES = [(1, 1), (7, 9), (8, 12), (16, 24), (61, 47), (5, 200), (3, 2)]


def random_planes(count, *, smooth=False):
    values = np.random.default_rng(count).normal(0, 1, (count, 8, 12)).astype(np.float32)
    if smooth:  # few of many can win in a strip
        values[:, :4] += np.linspace(0, 30, count, dtype=np.float32)[:, None, None]
        values[:, 4:] -= np.linspace(0, 30, count, dtype=np.float32)[:, None, None]
    return values


def scaled(planes, size):
    return torch.nn.functional.interpolate(
        torch.from_numpy(planes)[None], size=size, mode="bilinear", align_corners=False
    )[0]


@pytest.fixture(params=[1, 100, 1 << 18])
def strip_pixels(request, monkeypatch):
    monkeypatch.setattr(module, "_STRIP_PIXELS", request.param)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("count", "smooth"), [(1, False), (5, False), (60, True)])
def test_the_best_plane_is_that_of_torch(strip_pixels, size, count, smooth):
    planes = random_planes(count, smooth=smooth)
    expected = scaled(planes, size)
    best = best_planes(planes, size)
    wanted = expected.argmax(dim=0).numpy()
    margins = expected.topk(min(2, count), dim=0).values
    is_clear = ((margins[0] - margins[-1]) > 1e-5).numpy() | (count == 1)
    assert best.shape == size
    np.testing.assert_array_equal(best[is_clear], wanted[is_clear])
    assert is_clear.mean() > 0.99


@pytest.mark.parametrize("size", SIZES)
def test_a_plane_is_scaled_as_by_torch(strip_pixels, size):
    (plane,) = random_planes(1)
    expected = scaled(plane[None], size)[0].numpy()
    np.testing.assert_allclose(scale_plane(plane, size), expected, rtol=0, atol=1e-6)
    assert count_at_least(plane, size, 0.2) == int((expected >= 0.2).sum())


def test_of_equal_planes_the_first_one_is_the_best():
    planes = np.zeros((3, 4, 4), np.float32)
    assert not best_planes(planes, (9, 9)).any()


def test_planes_that_cannot_win_are_not_scaled(monkeypatch):
    planes = random_planes(50)
    planes[3] += 100
    calls = []
    scale = module._Scaling.scale
    monkeypatch.setattr(
        module._Scaling, "scale", lambda *arguments: calls.append(1) or scale(*arguments)
    )
    assert (best_planes(planes, (40, 40)) == 3).all()
    assert len(calls) == 1
