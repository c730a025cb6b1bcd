"""Make models: the small policy from scratch, and the two judges, like the files in data/."""
