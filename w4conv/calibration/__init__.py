"""Calibration: activations are observed on a calibration set; matrices are rounded for them."""
