"""Which form of the service an installation has."""

from installer.base.layout import Layout
from installer.service.manager import ServiceManager
from installer.service.prefix import PrefixService
from installer.service.systemd import SystemdService


def service_for(layout: Layout) -> ServiceManager:
    """The service manager of this installation."""
    return SystemdService(layout) if layout.system else PrefixService(layout)
