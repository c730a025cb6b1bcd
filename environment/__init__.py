"""What answers a completion while it is sampled."""
