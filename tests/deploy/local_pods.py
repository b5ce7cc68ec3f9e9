"""Rendered pods as processes of this machine: only addresses, ports and paths are others.

A container's command, arguments, variables and files are taken as they are rendered. The
addresses of Services, the content of volumes, issued certificates and an API server with the
EndpointSlices of the Services are added here.
"""

from __future__ import annotations

import contextlib
import ipaddress
import re
import shutil
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography import x509

from prfaas.cli.host.processes import ProcessPart
from prfaas.engines.launch import Command
from prfaas.wire.identity import issue
from tests.membership.fake_api import FakeApi, endpoint, endpoint_slice
from tests.ports import free_port

from .charts import NAMESPACE, ROOT, Object, matches, of_kind, pod_templates

IN_THE_IMAGE = "/opt/prfaas/examples"
HOST_NAME = "external-dns.alpha.kubernetes.io/hostname"
PROGRAMS = {"prfaas": [sys.executable, "-m", "prfaas"], "python3": [sys.executable]}
API_FOLDER = "/etc/prfaas/api"
SHARED_MEMORY = "/dev/shm"  # noqa: S108
"""The folder of a pod for which this machine's own serves."""


@dataclass
class LocalPod:
    """A pod on this machine."""

    name: str
    spec: Object
    labels: Object
    folder: Path
    ports: dict[int, int] = field(default_factory=dict)
    """Ports of this machine by those of the containers."""


@dataclass
class Cluster:
    """A site's objects and where its pods run.

    Attributes:
        objects: Rendered objects.
        home: Folder for everything.
        secrets: Content of Secrets that the chart does not make: files by name of the Secret.
        claims: Folders of volume claims, by name.
        authority: Folder with `ca.pem` and `ca.key`: the issuer of Certificates.
    """

    objects: list[Object]
    home: Path
    secrets: dict[str, dict[str, bytes]]
    claims: dict[str, Path]
    authority: Path
    pods: list[LocalPod] = field(default_factory=list)
    api: FakeApi = field(default_factory=lambda: FakeApi(NAMESPACE))

    def __post_init__(self) -> None:
        for each in of_kind(self.objects, "Certificate"):
            self.secrets[each["spec"]["secretName"]] = self._issued(each["spec"])
        replicas = {
            each["metadata"]["name"]: each["spec"].get("replicas", 1)
            for each in of_kind(self.objects, "Deployment", "DaemonSet", "Pod")
        }
        for owner, template in pod_templates(self.objects):
            for number in range(replicas[owner]):
                self.pods.append(self._place(f"{owner}-{number}", template))

    def _place(self, name: str, template: Object) -> LocalPod:
        folder = self.home / name
        folder.mkdir(parents=True)
        pod = LocalPod(name, template["spec"], template["metadata"]["labels"], folder)
        for container in _containers(pod.spec):
            for port in container.get("ports", []):
                pod.ports[port["containerPort"]] = free_port()
        return pod

    def _issued(self, spec: Object) -> dict[str, bytes]:
        """Return the Secret of a Certificate as cert-manager's CA issuer would fill it."""
        assert spec["usages"] == ["digital signature", "server auth", "client auth"]
        name, *further = spec["dnsNames"]
        names: list[x509.GeneralName] = [x509.DNSName(each) for each in further]
        names += [x509.UniformResourceIdentifier(each) for each in spec.get("uris", [])]
        certificate, key = issue(self.authority, name, names)
        authority = (self.authority / "ca.pem").read_bytes()
        return {"tls.crt": certificate, "tls.key": key, "ca.crt": authority}

    @contextlib.asynccontextmanager
    async def api_server(self) -> AsyncIterator[FakeApi]:
        """Run the API server, with the EndpointSlices of the Services that have labels for it."""
        address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        certificate, key = self.home / "api.pem", self.home / "api.key"
        issued = issue(self.authority, "kubernetes", [address])
        for file, content in zip((certificate, key), issued, strict=True):
            file.write_bytes(content)
        tls.load_cert_chain(certificate, key)
        await self.api.start(tls=tls)
        for service in of_kind(self.objects, "Service"):
            labels = service["metadata"]["labels"]
            if "prfaas/kind" in labels:
                pod, ports = self._behind(service)
                node = pod.spec.get("nodeSelector", {}).get("kubernetes.io/hostname", "any")
                name = service["metadata"]["name"]
                found = endpoint(pod.name, "127.0.0.1", node)
                await self.api.put(endpoint_slice(f"{name}-0", labels, ports, found))
        try:
            yield self.api
        finally:
            await self.api.stop()

    def _behind(self, service: Object) -> tuple[LocalPod, dict[str, int]]:
        """The pod of a Service, and the ports of this machine by those of the Service."""
        selector = {"matchLabels": service["spec"]["selector"]}
        pod = next(pod for pod in self.pods if matches(selector, pod.labels))
        named = {
            port["name"]: port["containerPort"]
            for container in _containers(pod.spec)
            for port in container.get("ports", [])
        }
        ports = service["spec"]["ports"]
        return pod, {port["name"]: pod.ports[named[port["targetPort"]]] for port in ports}

    def places(self) -> dict[str, str]:
        """Addresses of this machine by those at which the site's Services are reached."""
        found: dict[str, str] = {}
        for service in of_kind(self.objects, "Service"):
            _, ports = self._behind(service)
            hosts = [f"{service['metadata']['name']}.{NAMESPACE}.svc"]
            hosts += [service["metadata"].get("annotations", {}).get(HOST_NAME)]
            for port in service["spec"]["ports"]:
                local = ports[port["name"]]
                found |= {f"{host}:{port['port']}": f"127.0.0.1:{local}" for host in hosts if host}
        return found

    def parts(self, places: dict[str, str]) -> list[ProcessPart]:
        """The processes of all pods, in the order in which a pod starts them; no `helm test`.

        Args:
            places: Addresses of both sites.
        """
        return [
            part
            for pod in self.pods
            if "test" not in pod.labels["app.kubernetes.io/component"]
            for part in self._of_pod(pod, places)
        ]

    def test_command(self, places: dict[str, str]) -> list[str]:
        """Return the command of `helm test`."""
        (pod,) = [pod for pod in self.pods if pod.labels["app.kubernetes.io/component"] == "test"]
        (container,) = pod.spec["containers"]
        return self._command(pod, container, places).args

    def _of_pod(self, pod: LocalPod, places: dict[str, str]) -> list[ProcessPart]:
        folders = {
            volume["name"]: self._volume(pod, volume, places) for volume in pod.spec["volumes"]
        }
        found = []
        for container in _containers(pod.spec):
            command = self._command(pod, container, places, folders)
            if container["name"] == "folders":
                _prepare(command, container)
                continue
            probe = container["readinessProbe"]["httpGet"]
            (port,) = [p for p in container["ports"] if p["name"] == probe["port"]]
            health = f"http://127.0.0.1:{pod.ports[port['containerPort']]}"
            part = ProcessPart(
                name=f"{pod.name}-{container['name']}",
                kind=container["name"],
                command=command,
                # As the kubelet: the next container starts when this one has started.
                health_url=health + container["startupProbe"]["httpGet"]["path"],
                whole_url=health + probe["path"],
                log=self.home / "logs" / f"{pod.name}-{container['name']}.log",
            )
            found.append(part)
        return found

    def _command(
        self,
        pod: LocalPod,
        container: Object,
        places: dict[str, str],
        folders: dict[str, Path] | None = None,
    ) -> Command:
        paths = {IN_THE_IMAGE: str(ROOT / "examples")}
        for mount in container.get("volumeMounts", []):
            if mount["mountPath"] != SHARED_MEMORY and folders is not None:
                source = folders[mount["name"]]
                if "subPath" in mount:
                    _mount_file(paths, mount, source)
                else:
                    paths[mount["mountPath"]] = str(source)
        program, *more = container["command"]
        args = [
            self._here(text, pod, places, paths) for text in (*more, *container.get("args", []))
        ]
        env = {each["name"]: each["value"] for each in container.get("env", [])}
        env = {name: self._here(value, pod, places, paths) for name, value in env.items()}
        if folders is not None:
            mounted = {mount["name"] for mount in container.get("volumeMounts", [])}
            self._files_here(mounted, folders, pod, places, paths)
        path = str(Path(sys.executable).parent) + ":/usr/bin:/bin"
        if API_FOLDER in paths:
            # As in every pod.
            host, port = self.api.url.removeprefix("https://").split(":")
            env |= {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
        return Command(PROGRAMS.get(program, [program]) + args, {"PATH": path, **env})

    def _files_here(
        self,
        mounted: set[str],
        folders: dict[str, Path],
        pod: LocalPod,
        places: dict[str, str],
        paths: dict[str, str],
    ) -> None:
        for volume in pod.spec["volumes"]:
            if "configMap" in volume and volume["name"] in mounted:
                for file in folders[volume["name"]].iterdir():
                    if file.is_file():
                        file.write_text(self._here(file.read_text(), pod, places, paths))

    def _here(self, text: str, pod: LocalPod, places: dict[str, str], paths: dict[str, str]) -> str:
        for place in sorted(places, key=len, reverse=True):
            text = text.replace(place, places[place])
        for port, local in pod.ports.items():
            text = re.sub(rf"\b0\.0\.0\.0:{port}\b", f"127.0.0.1:{local}", text)
        # In one pass: what is put in may look like a path of the pod.
        known = "|".join(map(re.escape, sorted(paths, key=len, reverse=True)))
        return re.sub(rf"(?<![\w.-])({known})(?![\w-])", lambda found: paths[found[1]], text)

    def _volume(self, pod: LocalPod, volume: Object, places: dict[str, str]) -> Path:
        """A folder with what a volume holds."""
        if "hostPath" in volume:
            # Another folder of each node.
            node = pod.spec.get("nodeSelector", {}).get("kubernetes.io/hostname", "any")
            folder: Path = self.home / f"node-{node}" / volume["hostPath"]["path"].strip("/")
            folder.mkdir(parents=True, exist_ok=True)
            return folder
        if "persistentVolumeClaim" in volume:
            return self.claims[volume["persistentVolumeClaim"]["claimName"]]
        folder = pod.folder / str(volume["name"])
        folder.mkdir()
        publish(folder, self._content(volume))
        return folder

    def renew_identities(self) -> None:
        """Issue every Certificate anew and replace the files in all pods, as the kubelet does."""
        for each in of_kind(self.objects, "Certificate"):
            self.secrets[each["spec"]["secretName"]] = self._issued(each["spec"])
        for pod in self.pods:
            for volume in pod.spec.get("volumes", []):
                sources = volume.get("projected", {}).get("sources", [])
                if any("secret" in source for source in sources):
                    publish(pod.folder / str(volume["name"]), self._content(volume))

    def _content(self, volume: Object) -> dict[str, tuple[bytes, int]]:
        if "configMap" in volume:
            files = _chosen(self._config(volume["configMap"]["name"]), volume["configMap"])
            return {name: (content, 0o600) for name, content in files.items()}
        if "secret" in volume:
            secret = volume["secret"]
            files = _chosen(self.secrets[secret["secretName"]], secret)
            return {name: (content, secret["defaultMode"]) for name, content in files.items()}
        found: dict[str, tuple[bytes, int]] = {}
        for source in volume.get("projected", {}).get("sources", []):
            ((kind, told),) = source.items()
            mode = volume["projected"]["defaultMode"]
            if kind == "serviceAccountToken":
                found[told["path"]] = b"a-token", mode
                continue
            if kind == "downwardAPI":
                found |= {item["path"]: (NAMESPACE.encode(), mode) for item in told["items"]}
                continue
            files = (
                self._config(told["name"]) if kind == "configMap" else self.secrets[told["name"]]
            )
            found |= {item["path"]: (files[item["key"]], mode) for item in told["items"]}
        return found

    def _config(self, name: str) -> dict[str, bytes]:
        if name == "kube-root-ca.crt":
            return {"ca.crt": (self.authority / "ca.pem").read_bytes()}
        (found,) = [
            each for each in of_kind(self.objects, "ConfigMap") if each["metadata"]["name"] == name
        ]
        return {file: text.encode() for file, text in found["data"].items()}


def publish(folder: Path, files: dict[str, tuple[bytes, int]]) -> None:
    """Give a folder new content in one step, as the kubelet does: `..data` leads to another folder.

    Args:
        folder: Of a volume.
        files: Contents and modes by name.
    """
    version = folder / f"..{sum(1 for each in folder.iterdir() if each.is_dir())}"
    version.mkdir()
    for name, (content, mode) in files.items():
        (version / name).write_bytes(content)
        (version / name).chmod(mode)
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(Path("..data") / name)
    link = folder / "..data_tmp"
    link.symlink_to(version.name)
    link.replace(folder / "..data")


def _containers(spec: Object) -> list[Object]:
    return [*spec.get("initContainers", []), *spec["containers"]]


def _chosen(files: dict[str, bytes], volume: Object) -> dict[str, bytes]:
    """The files that a volume has of a ConfigMap or Secret: its `items`, or all."""
    if "items" not in volume:
        return files
    return {item["path"]: files[item["key"]] for item in volume["items"]}


def _mount_file(paths: dict[str, str], mount: dict[str, Any], source: Path) -> None:
    """One file of a volume inside the folder of another."""
    outer = next(path for path in paths if mount["mountPath"].startswith(f"{path}/"))
    shutil.copy(source / mount["subPath"], Path(paths[outer]) / mount["subPath"])


def _prepare(command: Command, container: Object) -> None:
    """Run what hands folders to the pod's user; here, to the user of the tests."""
    assert container["securityContext"]["runAsUser"] == 0
    args = [arg for arg in command.args if not arg.startswith(("--owner=", "--group="))]
    assert len(args) == len(command.args) - 2
    subprocess.run(args, env=command.env, check=True, timeout=60)
