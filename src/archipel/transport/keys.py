"""The keys of one run: who has them is let in, nobody else.

What belongs here: making them, and the TLS contexts that use them. What does not: how they reach
the hosts (over Ray's protected channel, pickled), and what is said with them (`transport.py`).

All hosts of a run share one certificate and its private key, made anew by the command. Each side of
a connection shows it and trusts it alone: whoever connects has the key, and nobody in between can
read or change what is said. Names and addresses are not compared, for hosts trust each other anyway
(see docs/security.md).
"""

from __future__ import annotations

import os
import ssl
import tempfile
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

NAME = "archipel"
VALID = timedelta(days=365)
CLOCKS_DIFFER = timedelta(days=1)
"""The clocks of two machines may."""


@dataclass(frozen=True)
class Keys:
    """A certificate and its private key, as PEM. Can be pickled; its text does not show the key."""

    certificate: bytes
    private_key: bytes = field(repr=False)

    @staticmethod
    def make() -> Keys:
        """New ones, for one run."""
        # Here, for hosts need only Python's own ssl.
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID

        key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, NAME)])
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - CLOCKS_DIFFER)
            .not_valid_after(now + VALID)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(NAME)]), critical=False)
            .sign(key, hashes.SHA256())
        )
        return Keys(
            certificate.public_bytes(serialization.Encoding.PEM),
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            ),
        )

    def context(self, *, server: bool) -> ssl.SSLContext:
        """What one side of a connection asks for, and shows."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_verify_locations(cadata=self.certificate.decode())
        # Python's ssl takes a private key from a file only. The folder is closed to others.
        with tempfile.TemporaryDirectory() as name:
            path = Path(name, "keys.pem")
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
            with open(descriptor, "wb") as file:
                file.write(self.certificate + self.private_key)
            context.load_cert_chain(path)
        return context
