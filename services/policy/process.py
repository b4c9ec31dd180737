"""A policy in its own process, asked under a deadline. Blocking; ``services.policy.runner`` calls it from a thread.

Messages are JSON, one a line, over a socket pair. First the parent sends name and settings, and the child
answers ``ready`` or ``refused``; then each snapshot is answered by ``decision``, ``raised`` or ``invalid``.
"""

from __future__ import annotations

import contextlib
import json
import math
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from pydantic import ValidationError

from wisp_core.allocation.solver import Rule, violations
from wisp_core.contracts import Decision, ReplicaSnapshot
from wisp_core.errors import ConfigurationError, WispError

MAX_REPLY_BYTES = 1 << 20
START_TIMEOUT_S = 60.0
_EXIT_GRACE_S = 1.0


class Fault(StrEnum):
    """What a policy did wrong; also the metric's label."""

    RAISED = "raised"
    TIMED_OUT = "timed_out"
    EXITED = "exited"
    INVALID = "invalid"
    OVER_BUDGET = "over_budget"
    BELOW_FLOOR = "below_floor"


class PolicyFaultError(WispError):
    """A policy gave no usable decision; ``fault`` says in which way."""

    def __init__(self, fault: Fault, message: str) -> None:
        super().__init__(message)
        self.fault = fault


@dataclass(frozen=True, kw_only=True)
class PolicySpec:
    """Which policy a process runs, and its bounds."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    memory_bytes: int = 2 << 30


class PolicyProcess:
    """One running child. A child that broke its protocol or deadline is killed; it is not restarted here."""

    def __init__(self, spec: PolicySpec) -> None:
        """Start the child and wait until it has loaded the policy.

        Raises ConfigurationError when the child refuses it, PolicyFaultError when it exits or takes too long.
        """
        request = json.dumps({"name": spec.name, "settings": spec.settings})
        self._buffer = b""
        self._socket, child_end = socket.socketpair()
        with child_end:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "services.policy.child", str(spec.memory_bytes)],
                stdin=child_end.fileno(),
                stdout=subprocess.DEVNULL,
            )
        reply = self._exchange(request, START_TIMEOUT_S)
        if "refused" in reply:
            self.kill()
            raise ConfigurationError(str(reply["refused"]))

    @property
    def is_alive(self) -> bool:
        """Whether the child still runs."""
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        """The child's process id."""
        return int(self._process.pid)

    def ask(self, snapshot: ReplicaSnapshot, deadline_s: float) -> Decision:
        """The policy's decision, checked against the replica's bounds. Raises PolicyFaultError.

        After a fault of the process itself (TIMED_OUT, EXITED, a reply that is no message) the child is dead.
        """
        reply = self._exchange(snapshot.model_dump_json(), deadline_s)
        if "raised" in reply:
            raise PolicyFaultError(Fault.RAISED, str(reply["raised"]))
        if "decision" not in reply:
            raise PolicyFaultError(Fault.INVALID, str(reply.get("invalid", reply)))
        return check_decision(snapshot, reply["decision"])

    def kill(self) -> None:
        """End the child and wait for it. Does nothing when it is dead."""
        self._process.kill()
        self._process.wait()
        self._socket.close()

    def _exchange(self, line: str, deadline_s: float) -> dict[str, Any]:
        """Send one line and read one within ``deadline_s``; kill the child when that fails."""
        try:
            reply = json.loads(self._exchange_bytes(line.encode() + b"\n", time.monotonic() + deadline_s))
            if not isinstance(reply, dict):
                raise PolicyFaultError(Fault.INVALID, f"the child answered {reply!r}")
        except TimeoutError as error:
            self.kill()
            raise PolicyFaultError(Fault.TIMED_OUT, f"no answer within {deadline_s} s") from error
        except OSError as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_EXIT_GRACE_S)  # for its exit code; its socket closes a moment earlier
            self.kill()
            raise PolicyFaultError(Fault.EXITED, f"the process exited, code {self._process.returncode}") from error
        except ValueError as error:
            self.kill()
            raise PolicyFaultError(Fault.INVALID, f"the child's answer is no message: {error}") from error
        except PolicyFaultError:
            self.kill()
            raise
        return reply

    def _exchange_bytes(self, line: bytes, until_s: float) -> bytes:
        """Raises TimeoutError, ConnectionError when the child is gone, ValueError when the reply is too long."""
        self._socket.settimeout(_left_s(until_s))
        self._socket.sendall(line)
        while b"\n" not in self._buffer:
            if len(self._buffer) > MAX_REPLY_BYTES:
                raise ValueError(f"longer than {MAX_REPLY_BYTES} bytes")
            self._socket.settimeout(_left_s(until_s))
            received = self._socket.recv(1 << 16)
            if not received:
                raise ConnectionResetError("end of stream")
            self._buffer += received
        reply, _, self._buffer = self._buffer.partition(b"\n")
        return reply


def check_decision(snapshot: ReplicaSnapshot, fields: object) -> Decision:
    """A decision from its JSON fields, if it is one and feasible on the replica. Raises PolicyFaultError.

    A hold is always feasible: it changes nothing.
    """
    try:
        decision = Decision.model_validate_json(json.dumps(fields), strict=True)
    except ValidationError as error:
        details = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']} (got {e['input']!r})" for e in error.errors())
        raise PolicyFaultError(Fault.INVALID, details) from error
    numbers = [decision.predicted_cost, decision.current_cost]
    if decision.marginals is not None:
        numbers += [decision.marginals.experts_s_per_byte, decision.marginals.kv_s_per_byte]
    if not all(math.isfinite(number) for number in numbers if number is not None):
        raise PolicyFaultError(Fault.INVALID, f"a predicted number is not finite: {numbers}")
    broken = [] if decision.split == snapshot.split else violations(snapshot, decision.split)
    if broken:
        fault = {Rule.OVER_BUDGET: Fault.OVER_BUDGET, Rule.BELOW_FLOOR: Fault.BELOW_FLOOR}
        raise PolicyFaultError(fault.get(broken[0].rule, Fault.INVALID), broken[0].message)
    return decision


def _left_s(until_s: float) -> float:
    """Seconds until ``until_s``; raises TimeoutError when there are none (0 would mean non-blocking)."""
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s
