"""Tasks whose answers a rule can judge. Config files import what they need from here."""
