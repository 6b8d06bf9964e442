"""Calibrate the graph that answers prompts about images: images, and points drawn in them.

feeder = PointFeeder.open(artifact, segmenter)
feeder(image_feeds, seed=0)["input_points"].shape    # (batch, 8, 2, 2)
"""

from __future__ import annotations

import numpy as np

from enginery.core.artifact.artifact import Artifact
from enginery.core.model.feeds import Feeds
from enginery.runtime.graph_roles import LABELS, POINTS, SegmenterGraphs
from enginery.runtime.onnxruntime.runner import OrtRunner

_OBJECTS = 8
"""Objects that are asked for in each image."""
_POINTS = 2
"""Points of each object."""


class PointFeeder:
    """Turn images, as inputs of the graph that encodes them, into those of prompts about them.

    The embeddings are computed anew each time, so that they take no memory in between.
    """

    def __init__(self, graphs: SegmenterGraphs, encoder: OrtRunner) -> None:
        """Take the records of both graphs, and the one of images in FP32."""
        self._graphs = graphs
        self._encoder = encoder

    @classmethod
    def open(cls, artifact: Artifact, graphs: SegmenterGraphs) -> PointFeeder:
        """Load the graph that encodes images.

        Raises:
            ArtifactError: it cannot be loaded.
        """
        return cls(graphs, OrtRunner(artifact, graph=graphs.images.file))

    def __call__(self, images: Feeds, *, seed: int) -> Feeds:
        """Return the inputs of prompts about a batch of images.

        The points are anywhere in the images, in pixels: half of the labels say that they are in
        the object, and half that they are beside it.

        Args:
            images: the inputs of the graph that encodes images; pixels are
                (batch, channels, height, width).
            seed: determines the points.
        """
        rows, _, height, width = images[self._graphs.images.inputs[0].name].shape
        generator = np.random.default_rng(seed)
        shape = (rows, _OBJECTS, _POINTS)
        feeds = {
            **self._encoder(images),
            POINTS: generator.uniform(0, (width, height), (*shape, 2)),
            LABELS: generator.integers(0, 2, shape),
        }
        return {
            spec.name: feeds[spec.name].astype(spec.dtype) for spec in self._graphs.prompts.inputs
        }
