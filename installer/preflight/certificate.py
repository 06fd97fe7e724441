"""The names that a certificate is valid for."""

from pathlib import Path

from cryptography import x509

MAX_BYTES = 1 << 20


def names_in(path: Path | None) -> tuple[str, ...] | None:
    """DNS names and addresses of its subjectAltName; None if there is no readable certificate."""
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            certificate = x509.load_pem_x509_certificate(file.read(MAX_BYTES))
        found = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (OSError, ValueError, x509.ExtensionNotFound):
        return None
    names = found.get_values_for_type(x509.DNSName)
    return (*names, *map(str, found.get_values_for_type(x509.IPAddress)))
