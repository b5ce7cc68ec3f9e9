"""The pool node as a whole: settings, limits of the host, health, orders on its blocks."""
