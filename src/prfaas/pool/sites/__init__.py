"""A pool node that several PD sites share by contract: who may do what, and who learns what."""
