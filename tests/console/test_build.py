import hashlib
from importlib import resources
from pathlib import Path

ROOT = Path(__file__).parents[2] / "console"


def test_the_shipped_page_is_built_from_this_source() -> None:
    found = [p for p in (ROOT / "src").rglob("*") if p.suffix in (".ts", ".tsx", ".css", ".json")]
    names = [path.relative_to(ROOT).as_posix() for path in found]
    digest = hashlib.sha256()
    for name in sorted([*names, "index.html", "learn.html", "package-lock.json"]):
        digest.update(name.encode() + b"\0" + (ROOT / name).read_bytes() + b"\0")
    stamp = resources.files("prfaas.gateway.console").joinpath("assets", "SOURCE").read_text()
    assert stamp.strip() == digest.hexdigest(), "run: make console"
