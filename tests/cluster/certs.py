"""Certificates of a control plane that lives for one test run: one CA, one server, a client per component."""

import base64
import datetime
import ipaddress
import json
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

VALID_FOR = datetime.timedelta(days=2)


def _pem(key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        # The API server wants the service-account key in this older form.
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.NoEncryption(),
    )


def _name(common_name: str, organization: str = "") -> x509.Name:
    attributes = [x509.NameAttribute(NameOID.COMMON_NAME, common_name)]
    if organization:
        attributes.append(x509.NameAttribute(NameOID.ORGANIZATION_NAME, organization))
    return x509.Name(attributes)


class Authority:
    """A CA that writes all it issues into one folder: NAME.crt, NAME.key, for clients NAME.kubeconfig."""

    def __init__(self, folder: Path, server: str) -> None:
        self._folder = folder
        self._server = server
        self._now = datetime.datetime.now(datetime.UTC)
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._subject = _name("headway-test-ca")
        usage = x509.KeyUsage(
            digital_signature=True,
            content_commitment=False,
            key_encipherment=False,
            data_encipherment=False,
            key_agreement=False,
            key_cert_sign=True,
            crl_sign=True,
            encipher_only=False,
            decipher_only=False,
        )
        certificate = (
            self._builder(self._subject, self._key)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        self.certificate = certificate.public_bytes(serialization.Encoding.PEM)
        (folder / "ca.crt").write_bytes(self.certificate)

    def _builder(self, subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(self._now - datetime.timedelta(hours=1))
            .not_valid_after(self._now + VALID_FOR)
        )

    def _issue(
        self, file: str, subject: x509.Name, purpose: x509.ObjectIdentifier, names: list[x509.GeneralName]
    ) -> tuple[bytes, bytes]:
        key = ec.generate_private_key(ec.SECP256R1())
        # Python verifies strictly: both key identifiers must be there.
        builder = (
            self._builder(subject, key)
            .add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False
            )
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        certificate = builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        (self._folder / f"{file}.crt").write_bytes(certificate)
        (self._folder / f"{file}.key").write_bytes(_pem(key))
        return certificate, _pem(key)

    def server(self, file: str, addresses: list[str], dns_names: list[str]) -> None:
        """A serving certificate."""
        names: list[x509.GeneralName] = [x509.DNSName(name) for name in dns_names]
        names += [x509.IPAddress(ipaddress.ip_address(address)) for address in addresses]
        self._issue(file, _name(file), ExtendedKeyUsageOID.SERVER_AUTH, names)

    def client(self, file: str, user: str, group: str = "") -> Path:
        """A client certificate and the kubeconfig that uses it."""
        certificate, key = self._issue(file, _name(user, group), ExtendedKeyUsageOID.CLIENT_AUTH, [])
        credentials = {
            "client-certificate-data": base64.b64encode(certificate).decode(),
            "client-key-data": base64.b64encode(key).decode(),
        }
        return self.kubeconfig(file, credentials)

    def kubeconfig(self, file: str, credentials: dict[str, str]) -> Path:
        """A kubeconfig for the plane with these credentials (a token, say)."""
        ca = base64.b64encode(self.certificate).decode()
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "plane",
            "contexts": [{"name": "plane", "context": {"cluster": "plane", "user": file}}],
            "clusters": [
                {"name": "plane", "cluster": {"server": self._server, "certificate-authority-data": ca}}
            ],
            "users": [{"name": file, "user": credentials}],
        }
        path = self._folder / f"{file}.kubeconfig"
        path.write_text(json.dumps(config, indent=1))
        return path


def service_account_keys(folder: Path) -> None:
    """sa.key signs service-account tokens, sa.pub checks them."""
    key = rsa.generate_private_key(65537, 2048)
    (folder / "sa.key").write_bytes(_pem(key))
    public = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    (folder / "sa.pub").write_bytes(public)
