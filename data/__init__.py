"""Comments and prompts."""
