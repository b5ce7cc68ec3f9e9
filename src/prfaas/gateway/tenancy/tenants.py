"""The tenants of a deployment: whose a request is, its salt, what it may use.

API keys are kept as SHA-256 hashes, and found without telling how close a guess was.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from prfaas.config.deployment import Deployment
from prfaas.config.tenants import TenantTable, max_ages
from prfaas.core.admission.fair_slots import FairSettings
from prfaas.core.admission.quotas import Quota, TenantLimits
from prfaas.core.codec.codecs import Quality
from prfaas.core.kv.tenant_salts import (
    class_salt,
    class_secret_of,
    client_salt,
    client_secret_of,
    salt_of,
    tenant_tag,
    user_salt,
    user_secret_of,
)
from prfaas.core.market.classes import ServiceClass
from prfaas.core.transfer.residency import Regions
from prfaas.deployment_secret import deployment_secret
from prfaas.gateway.openai.fields import STRICT, RequestRules, bad
from prfaas.gateway.openai.service_tier import Services, services_of
from prfaas.units import BITS_PER_BYTE

T = TypeVar("T")
PREFIX = "sk-prfaas-"
KEY_BYTES = 32
"""Random bytes of a key. As many as nobody guesses, so a plain hash keeps it secret."""
KEY_CHARS_MAX = 512
_SCHEME = "sha256:"


def new_key() -> str:
    """A key that nobody has had."""
    return PREFIX + secrets.token_urlsafe(KEY_BYTES)


def key_hash(key: str) -> str:
    """Hash of a key in a deployment file."""
    return _SCHEME + hashlib.sha256(key.encode()).hexdigest()


class ApiKeys(Generic[T]):
    """Owners by key.

    The time of a lookup does not depend on the key: hashes are compared under a secret of this
    process, so the time of comparisons reveals nothing about the stored keys.

    Args:
        owners: Hashes, as `key_hash` writes them, each with its owner.
    """

    def __init__(self, owners: Iterable[tuple[str, T]]) -> None:
        self._secret = secrets.token_bytes(KEY_BYTES)
        self._owners = {self._blinded(text): owner for text, owner in owners}

    def __bool__(self) -> bool:
        return bool(self._owners)

    def owner(self, key: str) -> T | None:
        """Return the owner of a key; None if unknown."""
        if not key or len(key) > KEY_CHARS_MAX:
            return None
        return self.owner_of(key_hash(key))

    def owner_of(self, text: str) -> T | None:
        """Return the owner of the key with this hash; None if unknown."""
        return self._owners.get(self._blinded(text))

    def _blinded(self, text: str) -> bytes:
        return hmac.digest(self._secret, text.encode(), "sha256")


DEFAULT_NAME = "default"
"""The one tenant of a deployment that names none."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant with its own blocks and limits."""

    name: str
    """In the deployment file; for operators only."""
    cache_salt: str
    """Makes its blocks its own. Secret."""
    quota: Quota
    link_weight: float = 1.0
    """Its share of a link against the others'."""
    link_bytes_per_s: int = 0
    """Rate of a link that its blocks may take; 0 is no limit."""
    rules: RequestRules = STRICT
    regions: Regions = frozenset()
    """Place where its blocks may be; none in deployments without regions."""
    user_secret: bytes = b""
    """Makes salts of its users; empty if they share their blocks. Secret."""
    class_secret: bytes = b""
    """Makes salts of its lossy quality classes. Secret."""
    client_secret: bytes = b""
    """Makes salts of requests that bring one of their own. Secret."""
    quality: Quality = Quality.LOSSLESS
    """Class of requests whose class of service has none."""

    def quality_of(self, service: ServiceClass | None) -> Quality:
        """Return the quality class of the blocks of a request, by its class of service."""
        return (service and service.quality) or self.quality

    def salt_for(
        self, user: object, quality: Quality = Quality.LOSSLESS, cache_salt: str = ""
    ) -> str:
        """Return the salt of a request; RequestError (400) if it is no string, and the tenant's
        users are isolated.

        Args:
            user: Its field `safety_identifier` or `user`; without one it shares with the tenant.
            quality: Class of its blocks.
            cache_salt: Its own salt, which parts it further; empty for none.
        """
        salt = self.cache_salt
        if self.user_secret and user not in (None, ""):
            if not isinstance(user, str):
                raise bad("safety_identifier and user must be strings", "safety_identifier")
            salt = user_salt(salt, self.user_secret, user)
        if cache_salt:
            salt = client_salt(salt, self.client_secret, cache_salt)
        return class_salt(salt, self.class_secret, quality) if quality.is_lossy else salt


class Tenants:
    """All tenants, found by key; ConfigError if the secret that salts come from cannot be made or
    read."""

    def __init__(self, deployment: Deployment) -> None:
        self._secret = secret = deployment_secret(deployment.state)
        tables = deployment.tenants
        regions = deployment.residency.allowed
        self.by_name = {
            name: Tenant(
                name,
                salt_of(secret, name),
                Quota(_limits(table)),
                table.weight,
                (table.link_rate or 0) // BITS_PER_BYTE,
                _rules(deployment, services_of(deployment, table), table.request_fields),
                regions(name),
                user_secret_of(secret, name) if table.isolate_users else b"",
                class_secret_of(secret, name),
                client_secret_of(secret, name),
                table.quality,
            )
            for name, table in tables.items()
        }
        self._ring = ApiKeys(
            (key, self.by_name[name]) for name, table in tables.items() for key in table.keys
        )
        self.shares = {
            tenant_tag(self.by_name[name].cache_salt): (table.cache_reserve, table.cache_max)
            for name, table in tables.items()
            if table.has_share
        }
        """Reserve and limit in pools of the tenants that have a share, by their tags."""
        self.default: Tenant | None = None
        if not tables:
            salt = salt_of(secret, DEFAULT_NAME)
            rules = _rules(deployment, services_of(deployment))
            quota = Quota(TenantLimits())
            self.default = Tenant(
                DEFAULT_NAME,
                salt,
                quota,
                rules=rules,
                regions=regions(""),
                class_secret=class_secret_of(secret, DEFAULT_NAME),
                client_secret=client_secret_of(secret, DEFAULT_NAME),
            )
            self.by_name[DEFAULT_NAME] = self.default
        tags = {name: tenant_tag(tenant.cache_salt) for name, tenant in self.by_name.items()}
        self.ages = max_ages(tables, tags, deployment.gateway.cache_max_age)

    def tag_of(self, name: str) -> str:
        """Return the tag of a tenant, also of one that is not in the deployment any more."""
        return tenant_tag(salt_of(self._secret, name))

    def of_key(self, key: str) -> Tenant | None:
        """Return the tenant of a key; without tenants every key is the default tenant's."""
        return self.default or self._ring.owner(key)


def fairness(deployment: Deployment) -> FairSettings:
    """Sharing between tenants under overload."""
    return FairSettings({name: table.weight for name, table in deployment.tenants.items()})


def _rules(deployment: Deployment, services: Services, fields: Iterable[str] = ()) -> RequestRules:
    return RequestRules(
        frozenset({*deployment.gateway.request_fields, *fields}),
        frozenset(domain.lower() for domain in deployment.model.media_domains),
        services,
    )


def _limits(table: TenantTable) -> TenantLimits:
    return TenantLimits(
        table.requests_per_minute,
        table.tokens_per_minute,
        table.requests_in_flight,
        None if table.link_rate is None else table.link_rate // BITS_PER_BYTE,
    )
