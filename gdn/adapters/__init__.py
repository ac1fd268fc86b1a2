"""Ways in from other formats and frameworks; each is imported only when asked for."""
