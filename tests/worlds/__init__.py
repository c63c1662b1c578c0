"""Small worlds in which the true answer can be computed."""
