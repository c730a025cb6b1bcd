"""Command line, files, devices, processes, the supervised loop of pretraining
and judges. Imported before torch, whose threads read the environment when they start."""
import os

# threads then spin for a moment only: on a busy machine a step takes a third of the time
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")

# kernels that oneDNN keeps, one for each shape in bfloat16: a thousand take a gigabyte. Making
# them again costs some percent of an iteration at most
os.environ.setdefault("LRU_CACHE_CAPACITY", "64")
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
