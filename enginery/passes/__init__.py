"""Graph passes: functions that analyze or edit an `onnx_ir.Model` in place. Stages call them."""
