"""`prfaas gateway` that verifies one transfer in N also of timing engines.

python -m benchmarks.governance.sampling_gateway N gateway ...

The deployment file refuses this, since blocks of timing engines depend on the salt: no verification
can end equal. Its cost is that of any other: the prompt is computed again, and its blocks are read.
"""

from __future__ import annotations

import sys
from typing import Any

from prfaas.cli.main import main
from prfaas.integrity.verifier import Verifier


def verify_one_in(count: int) -> None:
    """Have the gateway's verifier select one in `count`, whatever the deployment says."""
    made = Verifier.__init__

    def init(self: Verifier, _: int | None, *rest: Any, **named: Any) -> None:
        made(self, count, *rest, **named)

    Verifier.__init__ = init  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    verify_one_in(int(sys.argv.pop(1)))
    main()
