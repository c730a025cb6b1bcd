"""What any run needs and no paper mentions: processes, devices, files, checkpoints, lines,
metrics."""
