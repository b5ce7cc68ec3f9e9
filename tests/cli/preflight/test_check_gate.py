"""`prfaas check` as a gate: exit code 1 and a sentence for each thing that makes requests fail."""

import json
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from prfaas.wire.identity import make_authority, make_identity
from tests.cli.conftest import Prfaas, edit
from tests.ports import free_port

FILE = """
state = ".state"
[model]
name = "m"
path = "model"
generate = true
[gateway]
listen = "127.0.0.1:{gateway}"
[routing]
offload_threshold = 1000
[security]
identities = "identities"
[clusters.prfaas]
role = "prfaas"
engines.far = {{pool = "far-pool", url = "http://127.0.0.1:{far}"}}
pools.far-pool.address = "127.0.0.1:{pool}"
[clusters.pd]
role = "pd"
engines.near = {{pool = "near-pool", url = "http://127.0.0.1:{near}"}}
pools.near-pool = {{listen = "127.0.0.1:0"}}
"""


@contextmanager
def engine(status: int = 200, body: object = None) -> Iterator[int]:
    """Something that answers `/v1/models`; its port."""
    text = json.dumps({"data": [{"id": "m"}]} if body is None else body).encode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = status if self.path == "/v1/models" else 404
            self.send_response(found)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@contextmanager
def tls_server(context: ssl.SSLContext) -> Iterator[int]:
    """A part that shakes hands and says nothing; its port."""

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with closing(connection):
                try:
                    with context.wrap_socket(connection, server_side=True) as channel:
                        channel.recv(1)
                except OSError:
                    continue

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Writes the file; all ports that are not given are free."""
    monkeypatch.chdir(tmp_path)
    make_authority(Path("identities"))
    for name in ("gateway", "near-pool"):
        make_identity(Path("identities"), name)

    def write(**ports: int) -> Path:
        names = ("gateway", "far", "near", "pool")
        file = tmp_path / "site.toml"
        file.write_text(FILE.format(**{name: ports.get(name) or free_port() for name in names}))
        return file

    return write


def failures(prfaas: Prfaas, *args: object) -> list[str]:
    """The failures that `check` reports; its exit code is 1 if there are any."""
    code, output, _ = prfaas("check", *args)
    found = [line for line in output.splitlines() if line.startswith("failure: ")]
    assert code == (1 if found else 0)
    *_, last = output.splitlines()
    assert last.startswith(f"{args[0]}: " + (f"{len(found)} failure" if found else "ok"))
    return found


def of(found: list[str], part: str) -> str:
    [line] = [line for line in found if part in line]
    return line


def test_parts_that_do_not_run_are_failures_with_the_next_step(
    prfaas: Prfaas, site: Callable[..., Path]
) -> None:
    with engine() as near:
        found = failures(prfaas, site(near=near))
    assert len(found) == 2
    line = of(found, "clusters.prfaas.engines.far.url http://127.0.0.1:")
    assert "no engine answers: Connection refused; start it, or correct the address" in line
    line = of(found, "clusters.prfaas.pools.far-pool.address 127.0.0.1:")
    assert "nothing is offloaded over it: start it, or correct the address" in line


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (200, {"data": [{"id": "other"}]}, "it serves 'other', and not model.name = 'm': start it"),
        (200, {"data": []}, "it serves nothing, and not model.name = 'm'"),
        (200, {"models": []}, "answers no list of models; its url has to be that of an engine"),
        (200, [[[]]], "answers no list of models"),
        (200, "x" * (2 << 20), "answers no list of models"),
        (404, {}, "/v1/models answers 404; its url has to be that of an engine itself"),
        (401, {}, "it wants a key (status 401), and gateways send engines none"),
    ],
)
def test_an_engine_that_cannot_serve_the_model_is_a_failure(
    prfaas: Prfaas, site: Callable[..., Path], status: int, body: object, said: str
) -> None:
    with engine(status, body) as far, engine() as near:
        assert said in of(failures(prfaas, site(far=far, near=near)), "engines.far")


def test_a_pool_node_with_an_identity_of_another_authority_is_a_failure(
    prfaas: Prfaas, site: Callable[..., Path], tmp_path: Path
) -> None:
    make_authority(tmp_path / "other")
    identity = make_identity(tmp_path / "other", "far-pool")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(identity.certificate, identity.key)
    with engine() as port, tls_server(context) as pool:
        [line] = failures(prfaas, site(far=port, near=port, pool=pool))
    assert "certificate verify failed" in line
    assert "its certificate is of another authority than the gateway's" in line


def test_an_identity_of_another_authority_is_a_failure(
    prfaas: Prfaas, site: Callable[..., Path], tmp_path: Path
) -> None:
    make_authority(tmp_path / "other")
    other = make_identity(tmp_path / "other", "near-pool")
    for path in (other.certificate, other.key):
        path.rename(Path("identities") / path.name)
    with engine() as port:
        found = failures(prfaas, site(far=port, near=port))
    assert "near-pool.pem is not signed by an authority in" in of(found, "near-pool.pem")


def test_an_address_in_use_is_a_failure_unless_the_part_itself_has_it(
    prfaas: Prfaas, site: Callable[..., Path]
) -> None:
    with engine() as port:
        file = site(far=port, near=port, gateway=port)
        assert not [line for line in failures(prfaas, file) if "gateway cannot listen" in line]
    with engine(404) as taken, engine() as port:
        file = site(far=port, near=port, gateway=taken)
        line = of(failures(prfaas, file), "gateway cannot listen")
    assert f"127.0.0.1:{taken}: Address already in use; name another address" in line


@pytest.mark.parametrize(
    ("module", "table", "said"),
    [
        ("vllm", "", "a vLLM engine, which starts here, needs vllm"),
        (
            "opentelemetry.sdk",
            '[tracing]\nendpoint = "http://127.0.0.1:1/v1/traces"\n',
            "[tracing]",
        ),
    ],
)
def test_a_package_that_a_part_needs_is_a_failure(
    prfaas: Prfaas,
    laptop: Path,
    monkeypatch: pytest.MonkeyPatch,
    module: str,
    table: str,
    said: str,
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    laptop.write_text(laptop.read_text() + table)
    [line] = failures(prfaas, laptop)
    assert said in line
    assert "pip install 'prfaas[" in line


def test_warnings_are_failures_if_the_operator_says_so(prfaas: Prfaas, laptop: Path) -> None:
    assert prfaas("check", laptop, "--strict")[0] == 0
    edit(laptop, 'listen = "127.0.0.1:', 'listen = "0.0.0.0:')
    assert prfaas("check", laptop)[0] == 0
    code, output, _ = prfaas("check", laptop, "--strict")
    assert code == 1
    assert output.splitlines()[-1] == f"{laptop}: 0 failures, 2 warnings"
