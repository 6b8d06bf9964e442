"""Shapes that follow from what the nodes say."""

import onnx
import onnx_ir as ir
import pytest

from enginery.passes.ir.nodes import infer_types

SPLIT = """
<ir_version: 10, opset_import: ["" : 20]>
split (float[batch, sequence, 384] x, float[batch, sequence, {other}] y)
  => (float[a, b, c, d] heads)
<int64 zero = {{0}}, int64 one = {{1}}, int64[1] axis = {{0}}, int64[1] last = {{{last}}},
 int64[1] rest = {{-1}}>
{{
  shape = Shape(x)
  rows = Gather(shape, zero)
  positions = Gather(shape, one)
  first = Unsqueeze(rows, axis)
  second = Unsqueeze(positions, axis)
  target = Concat<axis = 0>(first, second, rest, last)
  split = Reshape(y, target)
  heads = Transpose<perm = [0, 2, 1, 3]>(split)
}}
"""


@pytest.mark.parametrize(
    ("other", "last", "heads"), [("384", 64, 6), ("width", 64, None), ("384", 100, None)]
)
def test_number_of_heads_follows_from_the_other_dims(other, last, heads):
    model = ir.from_proto(onnx.parser.parse_model(SPLIT.format(other=other, last=last)))
    infer_types(model, sizes=True)
    transposed = model.graph.outputs[0].producer()
    assert transposed is not None
    dim = transposed.inputs[0].shape[2]
    assert (dim if isinstance(dim, int) else None) == heads
