"""Advice about speed that a measurement and a look at the machine share.

>>> too_many_threads(8, 4, evidence="8 threads on 4 cores", remedy="Pass --threads 4.").finding
'there are more threads than physical cores'

The bench says it of what it measured, the doctor of what is set before anything runs.
"""

from __future__ import annotations

from enginery.core.artifact.reports import Advice


def too_many_threads(threads: int, cores: int, *, evidence: str, remedy: str) -> Advice | None:
    """Two threads of one core share its arithmetic units; None where there are no more than cores.

    Args:
        threads: as many as are asked for; 0 for a choice that is left open.
        cores: physical ones; 0 where they are not known.
        evidence: where the threads were asked for.
        remedy: how to ask for fewer.
    """
    if not 0 < cores < threads:
        return None
    return Advice("threads", "there are more threads than physical cores", evidence, remedy)


def exhaustive_search(evidence: str) -> Advice:
    """Each new shape makes cuDNN search for its convolutions' kernels again.

    Seen by users of ONNX Runtime: github.com/microsoft/onnxruntime/issues/13198 and /6978.
    """
    return Advice(
        "convolution search",
        "cuDNN searches for convolution kernels again at each new shape",
        evidence,
        "Set cudnn_conv_algo_search=HEURISTIC for the CUDA provider, or pad the inputs to a few "
        "sizes.",
    )
