"""Published models in and out."""
