"""Pure mathematics of the noising processes: functions of tensors, t = 0 data, t = 1 noise (docs/math.md)."""
