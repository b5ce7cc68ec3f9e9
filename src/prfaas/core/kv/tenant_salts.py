"""Cache salts and tags of tenants: whose a block is.

Who does not know a tenant's salt can neither guess nor reach the tenant's blocks. The gateway has
one secret and derives every tenant's salt from it and the tenant's name. Engines see salts, and
none of them reveals another.

A tag is a digest of the tenant's cache salt. It names a tenant to nobody who does not know the
salt, and nothing can be reached with it. Gateways put it into tickets; engines derive it from the
salt of a request, which they need for the names of its blocks anyway.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re

TAG_CHARS = 32
SUB_SALT = "."
"""Separates the salt of a tenant from that of one of its users, clients or quality classes."""
TAG_PATTERN = rf"^(?:[0-9a-f]{{{TAG_CHARS}}})?\Z"
"""A tag, or none."""
_TAG = re.compile(TAG_PATTERN)
_PURPOSE = b"prfaas tenant salt 1\0"
_USERS_PURPOSE = b"prfaas user salts 1\0"
_CLASSES_PURPOSE = b"prfaas class salts 1\0"
_CLIENTS_PURPOSE = b"prfaas client salts 1\0"


def salt_of(secret: bytes, tenant: str) -> str:
    """The salt of a tenant: HMAC-SHA256 of its name in URL-safe Base64. Never log it."""
    return _in_text(hmac.digest(secret, _PURPOSE + tenant.encode(), "sha256"))


def user_secret_of(secret: bytes, tenant: str) -> bytes:
    """The secret that the salts of a tenant's users derive from. Never log it."""
    return hmac.digest(secret, _USERS_PURPOSE + tenant.encode(), "sha256")


def class_secret_of(secret: bytes, tenant: str) -> bytes:
    """The secret that the salts of a tenant's quality classes derive from. Never log it."""
    return hmac.digest(secret, _CLASSES_PURPOSE + tenant.encode(), "sha256")


def client_secret_of(secret: bytes, tenant: str) -> bytes:
    """The secret that salts of a tenant's clients are mixed with. Never log it."""
    return hmac.digest(secret, _CLIENTS_PURPOSE + tenant.encode(), "sha256")


def client_salt(salt: str, client_secret: bytes, given: str) -> str:
    """The salt of requests that bring one of their own: it stays within that of their tenant.

    Args:
        salt: Of the tenant, or of one of its users.
        given: `cache_salt` of the request.
    """
    return _sub_salt(salt, client_secret, given.encode(errors="surrogatepass"))


def class_salt(salt: str, class_secret: bytes, name: str) -> str:
    """The salt of a lossy quality class of a tenant or a user: blocks of two classes never meet.

    Args:
        salt: Of the tenant, or of one of its users; that of the class `lossless`.
    """
    return _sub_salt(salt, class_secret, name.encode())


def user_salt(tenant_salt: str, user_secret: bytes, user: str) -> str:
    """The salt of one user of a tenant: it names the tenant, and reveals no other user's salt.

    Args:
        user: As the request names the user.
    """
    # JSON has lone surrogates, which are a user like any other.
    name = user.encode(errors="surrogatepass")
    return f"{tenant_salt}{SUB_SALT}{_in_text(hmac.digest(user_secret, name, 'sha256'))}"


def _sub_salt(salt: str, secret: bytes, name: bytes) -> str:
    """A salt below that of a tenant, for a name within what `salt` is for."""
    tenant, _, within = salt.partition(SUB_SALT)
    # What it is within has no separator, so that no two names and places are one text.
    words = name + SUB_SALT.encode() + within.encode()
    return f"{tenant}{SUB_SALT}{_in_text(hmac.digest(secret, words, 'sha256'))}"


def _in_text(digest: bytes) -> str:
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def tenant_tag(cache_salt: str | None) -> str:
    """Return the tag of a tenant, the same for all its users, clients' salts and quality classes.

    Args:
        cache_salt: Of a request; the tag of a request without one is empty.
    """
    if not cache_salt:
        return ""
    salt, _, _ = cache_salt.partition(SUB_SALT)
    digest = hashlib.blake2b(salt.encode(), digest_size=TAG_CHARS // 2, person=b"prfaas tenant")
    return digest.hexdigest()


def tag_in(text: str) -> str:
    """Return `text` if it is a tag, and otherwise no tag."""
    return text if _TAG.match(text) else ""
