"""Readers of other projects' weights and stand-ins for their functions; each imports its package only when used."""
