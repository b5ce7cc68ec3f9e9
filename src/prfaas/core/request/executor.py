"""Execution of actions: the method of a driver for each type of action.

Gateway and simulator have one subclass each. A driver without a method for an action cannot be
made, and the type of each method is checked against the action.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeAlias

from prfaas.core.request.actions import (
    ACTIONS,
    Abort,
    Action,
    AwaitBlocks,
    ContinueOn,
    Fail,
    FellBack,
    HoldBack,
    Release,
    Retry,
    StartDecode,
    StartPrefill,
    StartPull,
    StopPrefill,
    WakeAt,
)

Methods: TypeAlias = Mapping[type[Action], Callable[[Any, Any], None]]
_WORD_START = re.compile(r"(?<=[a-z])(?=[A-Z])")
NAMES = {kind: _WORD_START.sub("_", "_" + kind.__name__).lower() for kind in ACTIONS}
"""Name of the method by type of action: `_start_pull` for `StartPull`."""


class Executor(ABC):
    """Executes the actions of one request; see `actions.py` for the effect of each."""

    __slots__ = ()
    methods: ClassVar[Methods]
    """Methods of the driver by type of action."""

    def __init_subclass__(cls) -> None:
        cls.methods = {kind: getattr(cls, name) for kind, name in NAMES.items()}

    @abstractmethod
    def _start_pull(self, action: StartPull) -> None: ...

    @abstractmethod
    def _start_prefill(self, action: StartPrefill) -> None: ...

    @abstractmethod
    def _await_blocks(self, action: AwaitBlocks) -> None: ...

    @abstractmethod
    def _stop_prefill(self, action: StopPrefill) -> None: ...

    @abstractmethod
    def _start_decode(self, action: StartDecode) -> None: ...

    @abstractmethod
    def _hold_back(self, action: HoldBack) -> None: ...

    @abstractmethod
    def _continue_on(self, action: ContinueOn) -> None: ...

    @abstractmethod
    def _abort(self, action: Abort) -> None: ...

    @abstractmethod
    def _release(self, action: Release) -> None: ...

    @abstractmethod
    def _fell_back(self, action: FellBack) -> None: ...

    @abstractmethod
    def _retry(self, action: Retry) -> None: ...

    @abstractmethod
    def _fail(self, action: Fail) -> None: ...

    @abstractmethod
    def _wake_at(self, action: WakeAt) -> None: ...
