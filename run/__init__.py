"""What any run needs and no paper mentions: processes, devices, files, lines, metrics."""
import os

# imported before torch, whose threads then spin for a moment only: on a busy machine a step takes a
# third of the time
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")
