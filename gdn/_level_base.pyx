include "kernels/level.pxi"
