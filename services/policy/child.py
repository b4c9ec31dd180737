"""The process that runs a policy: it loads one, then answers each snapshot on its socket with a decision.

Started as ``python -m services.policy.child`` with a socket as standard input; see ``services.policy.process`` for
the other end and the messages. Whatever the policy prints goes to standard error.
"""

from __future__ import annotations

import json
import os
import queue
import resource
import socket
import sys
import threading
from collections import OrderedDict
from typing import Any, TextIO

from policies.registry import AnyPolicy, load_policy
from wisp_core.contracts import Decision, ReplicaSnapshot
from wisp_core.errors import ConfigurationError

MAX_REPLICAS = 4096
"""States kept at once; the replica that asked longest ago is forgotten first."""


class InvalidAnswerError(Exception):
    """A policy returned something that is no decision."""


class PolicyStates:
    """The policy and its state for each replica, started anew with each engine."""

    def __init__(self, policy: AnyPolicy) -> None:
        self._policy = policy
        self._states: OrderedDict[str, tuple[str, Any]] = OrderedDict()

    def decide(self, snapshot: ReplicaSnapshot) -> Decision:
        """The policy's decision; the state moves on only with one. Raises InvalidAnswerError, and what it raises."""
        incarnation, state = self._states.get(snapshot.replica_id, (None, None))
        if incarnation != snapshot.incarnation:
            state = self._policy.initial_state()
        returned: object = self._policy.decide(snapshot, state)
        if not (isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[0], Decision)):
            raise InvalidAnswerError(f"decide() returned {returned!r:.200}, not a tuple (Decision, state)")
        self._states[snapshot.replica_id] = (snapshot.incarnation, returned[1])
        self._states.move_to_end(snapshot.replica_id)
        while len(self._states) > MAX_REPLICAS:
            self._states.popitem(last=False)
        return returned[0]


def answer(states: PolicyStates, request: str) -> str:
    """One reply line: the decision, or that the policy raised, or that what it returned is no decision."""
    snapshot = ReplicaSnapshot.model_validate_json(request)
    try:
        return json.dumps({"decision": states.decide(snapshot).model_dump(warnings=False)}, default=repr)
    except InvalidAnswerError as error:
        return json.dumps({"invalid": str(error)})
    except Exception as error:  # noqa: BLE001 - a policy may raise anything; it is reported, counted and logged outside
        return json.dumps({"raised": f"{type(error).__name__}: {error}"[:1000]})


def serve(requests: queue.Queue[str], replies: TextIO) -> None:
    """Load, say so, then answer requests in order, for ever."""

    def reply(line: str) -> None:
        replies.write(line + "\n")
        replies.flush()

    try:
        request = json.loads(requests.get())
        states = PolicyStates(load_policy(request["name"], request["settings"]))
    except ConfigurationError as error:
        return reply(json.dumps({"refused": str(error)}))
    except Exception as error:  # noqa: BLE001 - importing a policy's module may raise anything; it refuses to start
        return reply(json.dumps({"refused": f"policy.name: loading failed: {type(error).__name__}: {error}"}))
    reply(json.dumps({"ready": True}))
    while True:
        reply(answer(states, requests.get()))


def main() -> None:
    """Take the socket, bound the memory, and serve; end when the other end closes, also while a policy hangs."""
    connection = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    memory_bytes = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    requests: queue.Queue[str] = queue.Queue()

    def read() -> None:
        with connection.makefile("r", encoding="utf-8") as lines:
            for line in lines:
                requests.put(line)
        os._exit(0)

    threading.Thread(target=read, name="requests", daemon=True).start()
    with connection.makefile("w", encoding="utf-8") as replies:
        serve(requests, replies)


if __name__ == "__main__":
    main()
