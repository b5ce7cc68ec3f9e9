"""The engine of a run: instances, links, caches and the decisions of the core on a virtual clock."""
