"""A searcher's way to its trainer, whichever attempt of the run that is: join, notice silence, find the next one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from enum import StrEnum

import msgspec

from tba_megatron.config_search import TransportConfig
from tba_megatron.errors import TransportError
from tba_megatron.transport.control_client import ControlChannel
from tba_megatron.transport.messages import FromSearcher, Goodbye, Hello, Refused, ToSearcher, Unknown, Welcome
from tba_megatron.transport.rendezvous import Rendezvous

_log = logging.getLogger(__name__)


class LinkState(StrEnum):
    ASKING = "asking"  # said hello, not welcomed yet
    JOINED = "joined"
    ALONE = "alone"  # the trainer is silent, or has ended without the run


class TrainerLink:
    """Joins the trainer of ``rendezvous`` and then each later one that ``find`` gives.

    ``find`` returns where the trainer is as of now, None while there is none; ``dial`` opens a channel to it; ``hello``
    is what to say there, but for the token. For one thread: call ``poll`` and then ``tend`` often.
    """

    def __init__(
        self,
        settings: TransportConfig,
        rendezvous: Rendezvous,
        *,
        find: Callable[[], Rendezvous | None],
        dial: Callable[[Rendezvous], ControlChannel],
        hello: Callable[[], Hello],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings, self._find, self._dial, self._hello, self._clock = settings, find, dial, hello, clock
        self._rendezvous = rendezvous
        self._channel = dial(rendezvous)
        self._ever_joined = False
        self._has_ended = False  # the trainer said so: its words are of no interest any more
        self._looked_s = clock()
        self._trouble = ""  # why it could not look for another trainer
        self._begin()

    @property
    def joined(self) -> bool:
        return self._state is LinkState.JOINED

    @property
    def state(self) -> LinkState:
        return self._state

    @property
    def token(self) -> str:
        """Of the trainer that was joined last."""
        return self._rendezvous.token

    def send(self, message: FromSearcher) -> None:
        """Between a hello and its welcome only a goodbye goes out: all else would be about what another trainer gave
        or asked for, and a trainer that has just heard the hello would take it for its own.
        """
        if self._state is not LinkState.ASKING or isinstance(message, Goodbye):
            self._channel.send(message)

    def poll(self, timeout_s: float = 0.0) -> list[ToSearcher]:
        """What the trainer has said. A ``Welcome`` among it means: joined, anew if it is not the first.

        TransportError when the trainer does not let this searcher in.
        """
        told = []
        for message in self._channel.poll(timeout_s):
            match message:
                case Unknown():
                    if self._state is not LinkState.ASKING:
                        _log.info("the trainer has started again and does not know this searcher; saying hello")
                        self._begin()
                case Refused():
                    self._refused(message)
                case Welcome():
                    self._state, self._ever_joined, self._has_ended = LinkState.JOINED, True, False
                    self._heard_s = self._clock()
                    told.append(message)
                case _ if not self._has_ended:
                    self._heard_s = self._clock()
                    if self._state is LinkState.ALONE:
                        _log.info("the trainer speaks again")
                        self._state = LinkState.JOINED
                    told.append(message)
        return told

    def tend(self) -> bool:
        """Look for another trainer now and then; False when there was none for all of ``transport.patience_s``.

        The time counts from the last word of a trainer, and anew from when another is found.
        """
        now_s = self._clock()
        if now_s - self._looked_s >= self._settings.heartbeat_s:
            self._looked_s = now_s
            found = self._look()
            if found is not None and (found.token, found.address) != (self._rendezvous.token, self._rendezvous.address):
                _log.info("attempt %d of the run is at %s; joining it", found.attempt, found.address)
                self._channel.close(linger_s=0.0)
                self._rendezvous, self._channel = found, self._dial(found)
                self._begin()
        if self._state is LinkState.JOINED and now_s - self._heard_s > self._settings.lease_s:
            _log.warning(
                "the trainer was silent for %g s; waiting up to %g s for it or another",
                self._settings.lease_s,
                self._settings.patience_s,
            )
            self._state = LinkState.ALONE
        if self._state is LinkState.ASKING and now_s - self._asked_s > self._settings.lease_s:
            _log.warning(
                "no trainer at %s answered within %g s, or it has another secret",
                self._rendezvous.address,
                self._settings.lease_s,
            )
            self._say_hello()
        return self._state is LinkState.JOINED or now_s - self._heard_s <= self._settings.patience_s

    def wait_for_next(self) -> None:
        """The trainer has ended and the run has not: nothing that it still says counts."""
        self._state, self._has_ended = LinkState.ALONE, True
        self._heard_s = self._clock()

    def close(self, linger_s: float = 2.0) -> None:
        self._channel.close(linger_s)

    def _look(self) -> Rendezvous | None:
        """A file that cannot be read for the moment ends nothing while there is a trainer."""
        try:
            found, self._trouble = self._find(), ""
        except TransportError as error:
            if str(error) != self._trouble:
                self._trouble = str(error)
                _log.warning("cannot look for another trainer: %s", error)
            return None
        return found

    def _begin(self) -> None:
        """With a trainer that was not spoken to before: it has all the time to answer."""
        self._say_hello()
        self._heard_s = self._asked_s

    def _say_hello(self) -> None:
        self._state, self._asked_s = LinkState.ASKING, self._clock()
        self._channel.send(msgspec.structs.replace(self._hello(), token=self._rendezvous.token))

    def _refused(self, message: Refused) -> None:
        found = self._look()
        is_current = found is not None and found.token == self._rendezvous.token
        if is_current and not self._ever_joined:
            raise TransportError(f"the trainer refused this searcher: {message.reason}")
        _log.warning("the trainer at %s refused this searcher: %s", self._rendezvous.address, message.reason)
