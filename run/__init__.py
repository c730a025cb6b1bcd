"""What any run needs and no paper mentions: processes, devices, files, lines, metrics."""
