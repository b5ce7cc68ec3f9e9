"""Properties of the engines of a deployment file that several parts need."""
