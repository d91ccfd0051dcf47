"""Open a pipeline, ask it for a picture, and know its shape before a byte of its weights is read.

Importing this package imports neither diffusers nor transformers: the functions do, when they are called.
"""

from __future__ import annotations

from offload.pipelines.calling import Picture, make_picture, num_steps
from offload.pipelines.checkpoint import pipeline_class
from offload.pipelines.opening import open_pipeline
from offload.pipelines.request import PictureRequest, check_request, requests_of
from offload.pipelines.sketch import PipelineSketch, sketch_pipeline

__all__ = [
    "Picture",
    "PictureRequest",
    "PipelineSketch",
    "check_request",
    "make_picture",
    "num_steps",
    "open_pipeline",
    "pipeline_class",
    "requests_of",
    "sketch_pipeline",
]
