"""Compute the metrics of a judge with numpy: correlation, agreement, calibration, overlap of texts, intervals."""
