"""Command line, files, devices, processes. Imported before torch, whose threads read the
environment when they start."""
import os

# let idle OpenMP threads sleep instead of spinning: on a busy machine a step is three times faster
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")

# cap oneDNN's cache of bfloat16 kernels, one per shape, a megabyte each. Building them again costs
# at most a few percent of an iteration
os.environ.setdefault("LRU_CACHE_CAPACITY", "64")
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")

# let a GPU's memory grow in place: micro-batches differ in shape, and the block that one frees may
# be too small for the next
if "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:     # its older name
    os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
