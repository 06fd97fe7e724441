"""Tell the running gateway that its keys or its certificate have changed."""

from installer.base.errors import InstallError
from installer.base.i18n import t
from installer.base.layout import Layout
from installer.service import units
from installer.service.choice import service_for


def reload_gateway(layout: Layout) -> str | None:
    """Make the gateway use the new files. Returns what is left to do, in words, or None.

    Under systemd a reload hands it new copies, and no connection breaks. In the prefix form it reads the key file by
    itself; a new certificate requires a restart there.
    """
    try:
        service_for(layout).reload_keys()
    except (InstallError, OSError):
        return t("The running gateway could not be notified. Restart it: systemctl restart {GATEWAY}",
                 GATEWAY=units.GATEWAY)
    return None
