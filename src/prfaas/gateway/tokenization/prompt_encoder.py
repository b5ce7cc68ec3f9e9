"""Prompts as token ids and block hashes: made once; long ones off the event loop.

Threads that tokenise are each bound to one tenant. `fastokens` keeps a word cache in every thread
that calls it. Threads that tenants share would let one measure which words another one has sent. A
thread here serves one tenant only; to serve another tenant it is ended, and its cache with it.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from prfaas.core.admission.quotas import Quota, tokenising_cost
from prfaas.core.kv.blocks import Layout
from prfaas.core.kv.hashes import Hashes
from prfaas.errors import ConfigError, RequestError
from prfaas.gateway.http.json_codec import JsonObject, make_ready
from prfaas.gateway.openai.fields import bad
from prfaas.gateway.openai.requests import Api, ClientRequest, MadePrompt
from prfaas.gateway.tenancy.tenants import Tenant
from prfaas.gateway.tokenization.chat_renderer import ChatRenderer, try_template
from prfaas.gateway.tokenization.known_prefixes import Beginning, Naming
from prfaas.gateway.tokenization.plain_tokenizer import plain_tokenizer
from prfaas.gateway.tokenization.text_encoder import (
    Encoder,
    TooLongError,
    bounds_of,
    pieces,
)

THREADS_MAX = 8
"""Threads of all tenants. A thread's cache takes about 20 MB with a vocabulary of 150,000."""
THREADS_EACH = 2
"""Threads of one tenant. Its further work waits for its own threads, not for a core."""


class _Thread:
    """One thread, bound to `tenant` from its start to its end."""

    def __init__(self, tenant: str) -> None:
        self.tenant = tenant
        self.executor = ThreadPoolExecutor(1, thread_name_prefix="tokenize")


class TenantThreads:
    """Runs work on threads of the tenant it is for. Every call comes from one event loop.

    Args:
        threads_max: Threads of all tenants, at least 1.
        threads_each: Threads of one tenant, at least 1.
    """

    def __init__(self, threads_max: int = THREADS_MAX, threads_each: int = THREADS_EACH) -> None:
        self._threads_max, self._threads_each = threads_max, threads_each
        self._idle: OrderedDict[_Thread, None] = OrderedDict()
        self._num_busy: Counter[str] = Counter()
        self._waiting: dict[str, deque[asyncio.Future[_Thread]]] = {}

    @property
    def num_threads(self) -> int:
        """Threads that there are."""
        return len(self._idle) + self._num_busy.total()

    @property
    def num_waiting(self) -> int:
        """Calls that wait for a thread."""
        return sum(map(len, self._waiting.values()))

    async def run(
        self, tenant: str, work: Callable[[], T], on_end: Callable[[Future[T]], None] | None = None
    ) -> T:
        """Run `work` on a thread of `tenant`, once one is free.

        Work that has begun continues when its caller is cancelled; its thread is busy until it
        ends.

        Args:
            on_end: Called on the event loop when work that has begun ends, before its caller
                continues, and also if that was cancelled.
        """
        thread = await self._acquire(tenant)
        loop = asyncio.get_running_loop()

        def end(done: Future[T]) -> None:
            self._release(thread)
            if on_end is not None and not done.cancelled():
                on_end(done)

        def ended(done: Future[T]) -> None:
            # A loop that is closed has nobody who waits.
            if not loop.is_closed():
                loop.call_soon_threadsafe(end, done)

        begun = thread.executor.submit(work)
        begun.add_done_callback(ended)
        return await asyncio.wrap_future(begun)

    def close(self) -> None:
        """Stop the threads once they are idle."""
        for thread in self._idle:
            thread.executor.shutdown(wait=False)
        self._idle.clear()

    async def _acquire(self, tenant: str) -> _Thread:
        # Those that were cancelled leave by themselves, a moment later.
        queue = self._waiting.get(tenant, ())
        if all(turn.done() for turn in queue) and (thread := self._free(tenant)):
            return thread
        turn: asyncio.Future[_Thread] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            return await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release(turn.result())
            else:
                self._leave(tenant, turn)
            raise

    def _free(self, tenant: str) -> _Thread | None:
        """A thread for a tenant, then busy: an idle one of its own, or a new one."""
        if self._num_busy[tenant] >= self._threads_each:
            return None
        thread = next((t for t in reversed(self._idle) if t.tenant == tenant), None)
        if thread is not None:
            del self._idle[thread]
        elif self._num_busy.total() >= self._threads_max:
            return None
        else:
            if self.num_threads >= self._threads_max:
                oldest, _ = self._idle.popitem(last=False)
                oldest.executor.shutdown(wait=False)
            thread = _Thread(tenant)
        self._num_busy[tenant] += 1
        return thread

    def _release(self, thread: _Thread) -> None:
        self._num_busy[thread.tenant] -= 1
        if not self._num_busy[thread.tenant]:
            del self._num_busy[thread.tenant]
        self._idle[thread] = None
        # Whoever has the fewest threads comes first, then whoever has waited longest.
        for tenant in sorted(self._waiting, key=lambda name: self._num_busy.get(name, 0)):
            # A cancelled waiter leaves by itself, a moment later.
            turn = next((turn for turn in self._waiting[tenant] if not turn.done()), None)
            if turn is not None and (found := self._free(tenant)):
                self._leave(tenant, turn)
                turn.set_result(found)
                return

    def _leave(self, tenant: str, turn: asyncio.Future[_Thread]) -> None:
        turns = self._waiting[tenant]
        turns.remove(turn)
        if not turns:
            del self._waiting[tenant]


T = TypeVar("T")
CUT_BY_ENGINE = 4
"""A prompt that the engine cuts may be so many times as long as the model's length."""
SHORT_BYTES_MAX = 8192
"""The prompt of a body up to this takes a millisecond or two: waking a thread is not worth it."""


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """A prompt as the engines see it."""

    sequences: Sequence[Sequence[int]]
    """Token ids; one entry unless the client sent several prompts."""
    hashes: Sequence[bytes]
    """Block hash chain of the only sequence; empty with several, or without a layout."""
    cache_salt: str
    """Its tenant's salt, which the chain begins with."""

    @property
    def token_ids(self) -> Sequence[int]:
        """Token ids of the only, or first, sequence."""
        return self.sequences[0]

    @property
    def num_tokens(self) -> int:
        """Tokens in all sequences."""
        return sum(len(sequence) for sequence in self.sequences)


class TooManyTokensError(RequestError):
    """A prompt is too long, and it took tokenising to find out.

    Attributes:
        num_tokens: Tokens that were made, about.
    """

    def __init__(self, message: str, param: str, num_tokens: int) -> None:
        super().__init__(message, param=param)
        self.num_tokens = num_tokens


class PromptMaker:
    """Makes prompts with the model's own tokenizer and chat template.

    Nothing of a text is left behind where another tenant's text comes by: see `TenantThreads` and
    `Encoder`.

    Args:
        is_shared: True if there are several tenants. Short texts of a single one are tokenised on
            the event loop.

    Raises:
        ConfigError: There is no tokenizer at `path`, or a package is missing to use it.
    """

    def __init__(self, path: str, *, is_shared: bool = True) -> None:
        self._tokenizer, self.vocab_size = _load(path)
        chat = try_template(self._tokenizer)
        self._bounds = bounds_of(self._tokenizer)
        self._encoder = Encoder(self._tokenizer, chat)
        self.renderer = ChatRenderer(self._tokenizer)
        self.chat_ids: Callable[[ClientRequest], Awaitable[list[int] | None]] = _own_chats
        """Returns the token ids of a chat that engines render otherwise; see `EngineRendering`."""
        make_ready(self.vocab_size)
        self._is_shared = is_shared
        self.threads = TenantThreads()

    def ids_of(self, text: str, special: bool) -> list[int]:
        """Return the token ids of a rendered chat.

        Args:
            special: True adds special tokens as the tokenizer does.
        """
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=special)
        return ids

    def close(self) -> None:
        """Stop the threads."""
        self.threads.close()

    async def words(self, ids: list[int], tenant: Tenant) -> tuple[str, list[str]]:
        """The text of token ids, and how the tokenizer writes each of them; on another thread.

        The tenant is charged for it, also if the caller does not wait for the end.
        """
        charge = partial(_charge, tenant.quota, lambda _: len(ids))
        return await self.threads.run(tenant.name, partial(self._words, ids), charge)

    def _words(self, ids: list[int]) -> tuple[str, list[str]]:
        # Ids that the model has and the tokenizer has not are no words.
        words = [word or "" for word in self._tokenizer.convert_ids_to_tokens(ids)]
        return str(self._tokenizer.decode(ids)), words

    async def prompt(
        self,
        client: ClientRequest,
        tenant: Tenant,
        layout: Layout | None,
        max_model_len: int,
        *,
        is_charged: bool = True,
    ) -> EncodedPrompt:
        """Render, tokenise and hash, on a thread of the tenant's.

        The tenant is charged `tokenising_cost` when it is done, also if the prompt is refused or
        the caller does not wait for the end.

        Args:
            tenant: Whose it is: its salt, or that of its user, begins the hash chain.
            layout: What to hash for; None skips hashing.
            max_model_len: Text that cannot possibly fit is refused untokenised, and the rest of a
                text is not tokenised once it is known not to fit.
            is_charged: False for work that is not the tenant's own.

        Raises:
            RequestError: 400, the chat template refuses the messages or the text is far too long.
            UnavailableError: An engine has to render the chat, and does not answer.
            TooManyTokensError: 400, tokenising has shown that it is too long.
        """
        quality = tenant.quality_of(client.service)
        salt = tenant.salt_for(client.user, quality, client.cache_salt)
        naming = Naming(salt, layout if len(client.prompts) <= 1 else None, tenant.name)
        charge: Callable[[Future[EncodedPrompt]], None] | None = None
        if is_charged:
            charge = partial(_charge, tenant.quota, _num_made)
        if (made := client.made) is not None:
            return _at_once(partial(_named, made, naming), charge)
        is_chat = client.api is Api.CHAT and client.is_exact
        chat_ids = await self.chat_ids(client) if is_chat else None
        work = partial(self._make, client, naming, max_model_len, chat_ids)
        is_short = client.num_bytes is not None and client.num_bytes <= SHORT_BYTES_MAX
        if is_short and not self._is_shared:
            return _at_once(work, charge)
        return await self.threads.run(tenant.name, work, charge)

    async def texts(
        self, prompt_ids: Sequence[int], token_ids: list[int], tenant: Tenant, *, skip_special: bool
    ) -> list[str]:
        """Text of each token of an answer, computed on another thread; see `pieces`;
        NoDetokenizerError if it cannot be determined exactly."""
        work = partial(pieces, self._tokenizer, prompt_ids, token_ids, skip_special=skip_special)
        return await self.threads.run(tenant.name, work)

    def _make(
        self,
        client: ClientRequest,
        naming: Naming,
        max_model_len: int,
        chat_ids: list[int] | None,
    ) -> EncodedPrompt:
        if client.api is Api.CHAT:
            special = bool(client.body.get("add_special_tokens"))
            prompts: list[str | list[int]] = [chat_ids or self.renderer.render(client)]
            param = "messages"
        else:
            special = client.body.get("add_special_tokens") is not False
            prompts, param = client.prompts, "prompt"
        tokens_max = max_model_len if client.is_exact else CUT_BY_ENGINE * max_model_len
        all_begun = [self._begun(prompt, special, naming) for prompt in prompts]
        for prompt, begun in zip(prompts, all_begun, strict=True):
            if isinstance(prompt, str):
                self._bounds.check(prompt, tokens_max, param, begun)
        made: list[tuple[Sequence[int], Hashes]] = []
        for prompt, begun in zip(prompts, all_begun, strict=True):
            try:
                made.append(self._one(prompt, special, naming, tokens_max, begun))
            except TooLongError as error:
                num_tokens = sum(len(ids) for ids, _ in made) + error.num_tokens
                raise TooManyTokensError(
                    f"This model's maximum context length is {max_model_len} tokens. However, the "
                    f"prompt has at least {error.num_tokens} tokens. Shorten it.",
                    param,
                    num_tokens,
                ) from None
        sequences, hashes = [ids for ids, _ in made], made[0][1]
        if not all(sequences):
            raise bad("the prompt has no tokens; at least 1 is needed")
        return EncodedPrompt(sequences, hashes, naming.cache_salt)

    def _begun(self, prompt: str | list[int], special: bool, naming: Naming) -> Beginning | None:
        return self._encoder.begun(prompt, special, naming) if isinstance(prompt, str) else None

    def _one(
        self,
        prompt: str | list[int],
        special: bool,
        naming: Naming,
        tokens_max: int,
        begun: Beginning | None,
    ) -> tuple[Sequence[int], Hashes]:
        if isinstance(prompt, str):
            return self._encoder.encode(prompt, special, naming, tokens_max, begun)
        return prompt, naming.hashes(prompt)


async def _own_chats(_: ClientRequest) -> list[int] | None:
    return None


def _named(made: MadePrompt, naming: Naming) -> EncodedPrompt:
    """A prompt that is tokenised; its blocks are named again where what names them has changed."""
    hashes = made.hashes if made.named_by == naming.key else naming.hashes(made.sequences[0])
    return EncodedPrompt(made.sequences, hashes, naming.cache_salt)


def _at_once(work: Callable[[], T], on_end: Callable[[Future[T]], None] | None) -> T:
    """Like `TenantThreads.run`, without a thread."""
    done: Future[T] = Future()
    try:
        done.set_result(work())
    except RequestError as error:
        done.set_exception(error)
    if on_end is not None:
        on_end(done)
    return done.result()


def _charge(quota: Quota, num_made: Callable[[T], int], done: Future[T]) -> None:
    """Charge what was tokenised."""
    error, num_tokens = done.exception(), 0
    if error is None:
        num_tokens = num_made(done.result())
    elif isinstance(error, TooManyTokensError):
        num_tokens = error.num_tokens
    quota.count_tokens(tokenising_cost(num_tokens), time.monotonic_ns())


def _num_made(prompt: EncodedPrompt) -> int:
    return prompt.num_tokens


def _load(path: str) -> tuple[Any, int]:
    """Tokenizer, and the number of token ids that the model knows."""
    # One text at a time, on a thread of ours: the tokenizer's own threads would be in the way.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    tokenizer, config = plain_tokenizer(Path(path)) or _load_with_transformers(path)
    vocab_size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size") or 0
    return tokenizer, max(len(tokenizer), int(vocab_size))


def _load_with_transformers(path: str) -> tuple[Any, JsonObject]:
    from transformers import AutoTokenizer, PretrainedConfig

    try:
        return AutoTokenizer.from_pretrained(path), PretrainedConfig.get_config_dict(path)[0]
    except (ImportError, OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"no tokenizer for model.path {path!r}: {reason}") from None
