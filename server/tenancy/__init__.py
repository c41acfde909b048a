"""Who asks, and whose cache they get: API keys, the check at the door, and the rule of namespaces."""

from server.tenancy.access import account_of
from server.tenancy.namespaces import namespace_for

__all__ = ["account_of", "namespace_for"]
