"""Make models: the small policy from scratch, and the two judges. What is bundled was made so."""
