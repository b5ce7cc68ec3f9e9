"""700 requests against a plan that says ten times as long as prefills take, with `ttft_max`.

    python -m tests.drill.misfit            the plan's profiles are of slower engines
    python -m tests.drill.misfit --scaled   timing engines run the plan ten times as fast

Three in ten prompts are long. Prints how many were refused, how many went away, and what TTFT was.
"""

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from .site import PREFILL, write_files
from .streams import at, streaming

NUM, PER_S = 700, 12.0
LONG_RATIO = 0.3
SHORT, LONG = (64, 800), (3000, 7000)
TTFT_MAX = "2s"
SLOWER = {"[0.005, 0.3]": "[0.05, 3.0]", "[0.006, 0.4]": "[0.06, 4.0]"}


def misfitting(local: Path, *, scaled: bool) -> Path:
    """The drill's deployment, routed by a plan that is ten times as slow."""
    file = write_files(local, PREFILL)
    plan = (local / "plan.toml").read_text()
    for fast, slow in SLOWER.items():
        plan = plan.replace(fast, slow)
    (local / "slow.toml").write_text(plan)
    routed = f'plan = "{local}/slow.toml"\nttft_max = "{TTFT_MAX}"\n'
    text = file.read_text().replace(f'policy = "paper"\nplan = "{local}/plan.toml"\n', routed)
    if scaled:
        timed = f'plan = "{local}/slow.toml"\ntime_scale = 0.1\n'
        text = text.replace(f'plan = "{local}/plan.toml"\n', timed)
    file.write_text(text)
    return file


async def drill(local: Path, *, scaled: bool) -> list[str]:
    """Run the drill, and return the lines to print."""
    async with streaming(misfitting(local, scaled=scaled)) as (streams, _):
        await streams.send(
            NUM,
            PER_S,
            lambda chance: chance.randint(*(LONG if chance.random() < LONG_RATIO else SHORT)),
        )
        records = await streams.records()
        status = await streams.get("/control/status")
    served = [each for each in streams.sent if each.status == 200]
    remote = sum(records[each.request_id]["path"] == "remote" for each in served)
    predictions = status.get("predictions", [])
    assert isinstance(predictions, list)
    return [
        f"| {'scaled' if scaled else 'other profiles'} | "
        f"{sum(each.status == 429 for each in streams.sent)} | {remote} | "
        f"{at(served, 0.5):.2f} s | {at(served, 0.99):.2f} s |",
        *(
            f"{each['path']} path: corrected by {each['correction']}, error {each['error']}, "
            f"{each['num_samples']} compared"
            for each in predictions
        ),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scaled", action="store_true")
    arguments = parser.parse_args()
    print("| plan | 429 of 700 | remote | TTFT p50 | TTFT p99 |\n|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        print("\n".join(asyncio.run(drill(Path(scratch), scaled=arguments.scaled))))
    sys.exit(0)
