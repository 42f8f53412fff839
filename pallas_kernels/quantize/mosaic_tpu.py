"""TPU."""
def quantize(x_MK, global_M1, *, format, interpret):
    raise AssertionError
