"""Command line, files, devices, processes. Imported before torch, whose threads read the
environment when they start."""
import os

# let idle OpenMP threads sleep instead of spinning: on a busy machine a step is three times faster
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")

# let a GPU's memory grow in place: micro-batches differ in shape, and the block that one frees may
# be too small for the next
if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:     # its older name
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
