"""Schedule search."""
