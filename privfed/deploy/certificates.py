"""What is wrong with a certificate and its key."""

import socket
import ssl
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import NameOID

from privfed.files import read_pinned, read_private

_MOST_BYTES = 100_000


def certificate_problems(certificate: Path, *, key: Path, authority: Path, name: str, now: datetime) -> list[str]:
    """What is wrong with a party's certificate, a line each, with what to do next; nothing, if it can be used now.

    Args:
        certificate: PEM file.
        key: PEM file with its private key. Secret.
        authority: PEM file with the certificate of who signed it.
        name: Whose it must be.
        now: The time, with its zone.
    """
    again = "ask the operator for new certificates (privfed deploy certificates)"
    try:
        held = x509.load_pem_x509_certificate(read_pinned(certificate, most=_MOST_BYTES))
        root = x509.load_pem_x509_certificate(read_pinned(authority, most=_MOST_BYTES))
    except (OSError, ValueError) as error:
        return [f"{certificate.name}: the certificate, or that of its authority, cannot be read ({error}); {again}"]
    found: list[str] = []
    for which, each in (("certificate", held), ("authority's certificate", root)):
        found += date_problems(each, said=f"{certificate.name}: the {which}", now=now, again=again)
    if not is_issued_by(held, root):
        found.append(f"{certificate.name}: it is not signed by {authority.name}; {again}")
    if (subject := _common_name(held)) != name:
        found.append(f"{certificate.name}: it belongs to {subject!r}, not to {name!r}; put the file of {name!r} back, or {again}")
    return [*found, *key_problems(held, certificate=certificate, key=key, again=again)]


def date_problems(certificate: x509.Certificate, *, said: str, now: datetime, again: str) -> list[str]:
    """What is wrong with when a certificate counts, a line each; nothing, if it counts now.

    Args:
        certificate: Anybody's.
        said: What it is called, in front of what is wrong with it.
        now: The time, with its zone.
        again: What to do where it expired.
    """
    found: list[str] = []
    if certificate.not_valid_after_utc <= now:
        found.append(f"{said} expired on {_minute(certificate.not_valid_after_utc)}; {again}")
    if certificate.not_valid_before_utc > now:
        found.append(
            f"{said} begins on {_minute(certificate.not_valid_before_utc)} and the clock of this machine says {_minute(now)}; set the clock"
        )
    return found


def is_issued_by(held: x509.Certificate, authority: x509.Certificate) -> bool:
    """Whether the one signed the other, with no third in between."""
    try:
        held.verify_directly_issued_by(authority)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def key_problems(held: x509.Certificate, *, certificate: Path, key: Path, again: str) -> list[str]:
    """What is wrong with the private key of a certificate, a line each; nothing, if it belongs to it and nobody else can read it.

    Args:
        held: The certificate.
        certificate: Its file.
        key: PEM file with its private key. Secret.
        again: What to do where it is lost.
    """
    try:
        private = serialization.load_pem_private_key(read_private(key, most=_MOST_BYTES), password=None)
    except PermissionError as error:
        return [f"{key.name}: {error}"]
    except OSError:
        return [f"{key.name}: the private key is missing; put it back, or {again}"]
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return [f"{key.name}: it is no private key; put it back, or {again}"]
    if _raw(private.public_key()) != _raw(held.public_key()):
        return [f"{key.name}: it is not the key of {certificate.name}; put back the key that was made with it, or {again}"]
    return []


def lets_strangers_in(host: str, port: int, *, seconds: float) -> bool | None:
    """Whether a server finishes TLS with somebody who shows no certificate; None if there is no connection, or no TLS.

    Args:
        host: Name or address.
        port: Port.
        seconds: How long to wait for each step.
    """
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # nothing is sent and nothing is believed: only whether the server asks matters
    context.set_alpn_protocols(["h2"])
    try:
        with socket.create_connection((host, port), timeout=seconds) as plain, context.wrap_socket(plain) as secured:
            # In TLS 1.3 the client is done before the server has missed the certificate: what it sends next tells.
            return bool(secured.recv(1))
    except TimeoutError:
        return None
    except ssl.SSLError:
        return False
    except OSError:
        return None


def _raw(key: object) -> bytes:
    encode = getattr(key, "public_bytes")  # noqa: B009 -- every kind of public key has it, and no common type says so
    return encode(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def _common_name(certificate: x509.Certificate) -> str:
    names = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    return str(names[0].value) if names else ""


def _minute(time: datetime) -> str:
    return f"{time.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
