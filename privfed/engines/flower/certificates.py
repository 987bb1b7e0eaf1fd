"""Certificates and keys for trying a deployment: a TLS certificate for the server, and a key for each SuperNode.

In production, the server's certificate comes from an authority that the banks trust already.
"""

import datetime
import ipaddress

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, EllipticCurvePrivateKey, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

LIFETIME = datetime.timedelta(days=365)


def server_certificate(host: str, *, now: datetime.datetime) -> tuple[bytes, bytes, bytes]:
    """A certificate for a host, which also names the host's own loopback.

    Args:
        host: Name or address under which the banks reach the server.
        now: From when it counts; it ends after `LIFETIME`.

    Returns:
        The authority's certificate, the server's certificate and its private key, in PEM. The authority's own key is gone with this call:
        nobody can make another certificate that the banks would trust; a renewal makes a new authority.
    """
    authority_key, key = generate_private_key(SECP384R1()), generate_private_key(SECP384R1())
    authority_name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "privfed local authority")])
    usage = dict.fromkeys(_USAGES, False)
    authority = (
        _builder(authority_name, authority_name, authority_key, now)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.KeyUsage(**usage | {"key_cert_sign": True, "crl_sign": True}), critical=True)
        .sign(authority_key, hashes.SHA384())
    )
    names = [_general_name(name) for name in dict.fromkeys((host, "localhost", "127.0.0.1"))]
    server = (
        _builder(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "privfed server")]), authority_name, key, now)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.KeyUsage(**usage | {"digital_signature": True}), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key()), critical=False)
        .sign(authority_key, hashes.SHA384())
    )
    private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return authority.public_bytes(Encoding.PEM), server.public_bytes(Encoding.PEM), private


def node_key() -> tuple[bytes, bytes]:
    """A key with which a SuperNode signs in: the private and the public half, in OpenSSH's format."""
    key = generate_private_key(SECP384R1())
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    return key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()), public + b"\n"


_USAGES = (
    "digital_signature",
    "content_commitment",
    "key_encipherment",
    "data_encipherment",
    "key_agreement",
    "key_cert_sign",
    "crl_sign",
    "encipher_only",
    "decipher_only",
)


def _builder(subject: x509.Name, issuer: x509.Name, key: EllipticCurvePrivateKey, now: datetime.datetime) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        # A bank's clock may be a little behind the one that made the certificate.
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + LIFETIME)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
