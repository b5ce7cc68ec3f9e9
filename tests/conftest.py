"""What all tests share."""

from hypothesis import settings

# A slow example on a busy machine is no finding; the timeout of every test stands.
settings.register_profile("prfaas", deadline=None)
settings.load_profile("prfaas")
