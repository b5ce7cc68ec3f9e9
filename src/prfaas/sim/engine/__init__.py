"""The engine of a run: instances, links, caches and core decisions on a virtual clock."""
