"""Keys of tenants: random, so that only their copies can be destroyed, and nothing derives them."""

from __future__ import annotations

from dataclasses import dataclass, field
from secrets import token_bytes

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

KEY_ID_BYTES, KEY_BYTES = 16, 32
NO_TENANT = "none"


@dataclass(frozen=True, slots=True)
class TenantKey:
    """A key that seals blocks of one tenant."""

    id: bytes
    """Its name, KEY_ID_BYTES random bytes."""
    tenant: str
    """Tag of the tenant; empty for blocks without one."""
    made_s: int
    """Time at which it was made, seconds since 1970."""
    secret: bytes = field(repr=False)
    """KEY_BYTES random bytes."""

    @property
    def bound(self) -> bytes:
        """Bytes that a wrapped key is bound to."""
        return b"%s %s %d" % (self.id, self.tenant.encode(), self.made_s)

    @property
    def ref(self) -> str:
        """Its name as blocks in a bucket refer to it: TENANT/ID."""
        return f"{self.tenant or NO_TENANT}/{self.id.hex()}"

    def cipher(self, salt: bytes, purpose: bytes) -> AESGCM:
        """Return the cipher of one file or object.

        Args:
            salt: Random bytes of the file or object, which no other one has.
            purpose: Separates kinds of files and objects.
        """
        derived = HKDF(hashes.SHA256(), KEY_BYTES, salt, b"prfaas tenant key: " + purpose)
        return AESGCM(derived.derive(self.secret))


def new_key(tenant: str, made_s: int) -> TenantKey:
    """Make a key of a tenant."""
    return TenantKey(token_bytes(KEY_ID_BYTES), tenant, made_s, token_bytes(KEY_BYTES))
