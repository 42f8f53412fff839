"""Post-hoc quantisation of weights for comparison: calibration, H-Scale, a table of variants."""
