"""The proxy in front of the engines that sites share: it decides whose prompt is next."""
