"""The one configuration of a WiSP service: a YAML file, validated once, every error at once."""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from services.setting_errors import explain
from wisp_core.contracts import Barrier
from wisp_core.errors import ConfigurationError
from wisp_core.settings import EngineSettings
from wisp_core.tenant_contracts import Isolation, TenantId, TenantLimits


class _UniqueKeys(yaml.SafeLoader):
    """YAML where a repeated key is an error: of two sections with one name the last would win, without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping of ``node``. Raises YAMLError that names the line."""
        seen = set[str]()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value} is given twice", key.start_mark)
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else "")
        return super().construct_mapping(node, deep)


class Section(BaseModel):
    """Base of every section: frozen, unknown keys refused, no NaN or infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class HttpSettings(Section):
    """The public endpoint."""

    host: str = Field(default="127.0.0.1", description="Address to listen on.")
    port: int = Field(default=8000, ge=1, le=65535, description="TCP port.")
    max_body_bytes: int = Field(default=2 << 20, gt=0, description="Larger request bodies get 413.")
    max_header_bytes: int = Field(default=16 << 10, gt=0, description="Larger request headers get 431.")
    body_timeout_s: float = Field(default=30.0, gt=0, description="A body that takes longer to come gets 408, seconds.")
    num_ingresses: int = Field(default=1, ge=1, description="Ingress processes.")


class ModelSettings(Section):
    """Which model every replica serves."""

    path: str = Field(description="Hugging Face MoE directory or name, as vLLM takes it.")
    served_name: str | None = Field(default=None, description="Name in the API; default: the path's last part.")

    @property
    def name(self) -> str:
        """The name that clients use."""
        return self.served_name or Path(self.path).name


class AutoscalingSettings(Section):
    """When replicas are added to ``replica.count``, and taken away again down to it."""

    max_count: int = Field(gt=1, description="Most replicas.")
    target_turns: float = Field(default=8.0, gt=0, description="Turns at once that a replica should have.")
    max_copy_share: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="Part of the time that a replica may spend copying experts in decode steps.",
    )
    up_delay_s: float = Field(default=10.0, ge=0, description="How long more must be wanted, seconds.")
    down_delay_s: float = Field(default=300.0, ge=0, description="How long fewer must be enough, seconds.")


class ReplicaSettings(Section, EngineSettings):
    """One replica: a paged vLLM engine on one low-VRAM device."""

    count: int = Field(default=2, ge=1, description="Replicas that tenants share.")
    autoscaling: AutoscalingSettings | None = Field(
        default=None, description="More replicas while there is work for them; None: always ``count``."
    )
    vram_budget_bytes: int = Field(gt=0, description="Everything a replica may hold on its device, bytes.")
    initial_cap: int | None = Field(
        default=None, gt=0, description="Slots per layer at start; None: half of the pools."
    )
    barrier: Barrier = Field(default=Barrier.BALLOON, description="When KV blocks may be taken.")
    num_cpus: float = Field(default=1.0, ge=0, description="Ray CPUs per replica.")
    num_gpus: float = Field(default=0.0, ge=0, description="Ray GPUs per replica; 0 on CPU.")
    max_ongoing_turns: int = Field(default=64, gt=0, description="Turns a replica accepts at once, queue included.")
    snapshot_period_s: float = Field(default=0.5, gt=0, description="How often snapshots go to Redis, seconds.")
    graceful_shutdown_timeout_s: float = Field(default=300.0, gt=0, description="Above the longest turn, seconds.")
    env: dict[str, str] = Field(default_factory=dict, description="Environment of each replica's engine.")
    engine: dict[str, Any] = Field(
        default_factory=dict, description="vLLM engine arguments by their Python names, e.g. max_model_len, block_size."
    )

    @model_validator(mode="after")
    def _may_grow(self) -> Self:
        if self.autoscaling is not None and self.autoscaling.max_count <= self.count:
            raise ValueError(
                f"replica.autoscaling.max_count ({self.autoscaling.max_count}) must be above replica.count "
                f"({self.count}), or leave replica.autoscaling out"
            )
        return self


class RedisSettings(Section):
    """Shared state."""

    url: str | None = Field(default=None, description="redis:// or rediss:// URL; None: embedded Valkey on loopback.")
    timeout_s: float = Field(default=0.2, gt=0, description="Socket timeout of one call, seconds.")
    stale_after_s: float = Field(default=10.0, gt=0, description="Age at which snapshots count as missing, seconds.")

    @field_validator("url")
    @classmethod
    def _is_redis_url(cls, url: str | None) -> str | None:
        # Not repeated in the message: it may hold a password.
        if url is None:
            return None
        parts = urlsplit(url)
        if parts.scheme not in {"redis", "rediss", "unix"} or not (parts.hostname or parts.path):
            raise ValueError("give a URL such as redis://HOST:6379/0, rediss:// or unix://")
        try:
            _ = parts.port
        except ValueError as error:
            raise ValueError("its port is no number up to 65535; give a URL such as redis://HOST:6379/0") from error
        return url


class DampingSettings(Section):
    """Bounds around any policy: a change is made only when confirmed, large enough and not too large."""

    confirmations: int = Field(default=2, ge=1, description="Epochs in a row that must agree on the direction.")
    dead_zone_fraction: float = Field(
        default=0.05, ge=0, le=1, description="Smallest move where no cost is predicted, fraction of the budget."
    )
    max_step_fraction: float = Field(default=1.0, gt=0, le=1, description="Largest move, fraction of the budget.")
    min_gain_fraction: float = Field(default=0.02, ge=0, description="Least predicted gain, fraction of the cost.")


class PolicySettings(Section):
    """Who divides each replica's budget."""

    name: str = Field(default="mv_wsa", description="Built-in name, entry point in wisp.policies, or module:Class.")
    settings: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments of the policy class.")
    epoch_s: float = Field(default=1.0, gt=0, description="Time between decisions, seconds.")
    deadline_s: float = Field(default=1.0, gt=0, description="A policy that takes longer is stopped, seconds.")
    damping: DampingSettings = DampingSettings()


class RouterName(StrEnum):
    """Which router places turns."""

    WORKING_SET = "working_set"
    POWER_OF_TWO = "power_of_two"
    CONSISTENT_HASH = "consistent_hash"


class RoutingSettings(Section):
    """Weights and limits of placement; all scores are predicted seconds."""

    router: RouterName = Field(
        default=RouterName.WORKING_SET, description="Who places turns; Serve's own routers are there to compare with."
    )
    migrate_gain_s: float = Field(
        default=0.5, ge=0, description="A session moves only when it saves this much, seconds."
    )
    refresh_s: float = Field(default=0.25, gt=0, description="How often routers re-read snapshots, seconds.")


class TenantSettings(Section, TenantLimits):
    """A tenant declared in the file; the key itself stays outside, in a file or as its SHA-256."""

    tenant_id: TenantId
    key_sha256: str | None = Field(
        default=None, pattern=r"^[0-9a-f]{64}$", description="SHA-256 of the key in lower-case hex, never the key."
    )
    key_file: Path | None = Field(
        default=None, description="File that holds the key; created with a new one if absent."
    )
    isolation: Isolation = Field(
        default=Isolation.SHARED,
        description="dedicated: dedicated_replicas of its own beside replica.count, which no other tenant reaches.",
    )
    dedicated_replicas: int = Field(default=1, ge=1, description="With isolation: dedicated.")

    @model_validator(mode="after")
    def _exactly_one_key(self) -> Self:
        if (self.key_sha256 is None) == (self.key_file is None):
            raise ValueError("give exactly one of key_sha256 and key_file")
        return self

    @model_validator(mode="after")
    def _only_dedicated_has_replicas(self) -> Self:
        if self.isolation is Isolation.SHARED and self.dedicated_replicas != 1:
            raise ValueError("dedicated_replicas is for isolation: dedicated")
        return self


class ServiceConfig(Section):
    """The whole service."""

    name: str = Field(
        default="wisp", pattern=r"^[a-z][a-z0-9-]{0,30}$", description="Serve application and key prefix."
    )
    state_dir: Path = Field(
        default=Path(".wisp"), description="Secrets, sockets and Valkey's log; the start says where the other logs are."
    )
    http: HttpSettings = HttpSettings()
    model: ModelSettings
    replica: ReplicaSettings
    redis: RedisSettings = RedisSettings()
    policy: PolicySettings = PolicySettings()
    routing: RoutingSettings = RoutingSettings()
    tenants: tuple[TenantSettings, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _tenants_are_distinct(self) -> Self:
        """Two tenants with one key would be one: the last one's quota, cache and sessions for both."""
        ids = Counter(tenant.tenant_id for tenant in self.tenants)
        keys = Counter(
            tenant.key_sha256 or str(tenant.key_file and tenant.key_file.resolve()) for tenant in self.tenants
        )
        for what, counts in (("tenant_id", ids), ("key", keys)):
            if repeated := sorted(name for name, count in counts.items() if count > 1):
                raise ValueError(f"tenants: each needs a {what} of its own, these are repeated: {', '.join(repeated)}")
        return self

    @property
    def num_replicas(self) -> int:
        """Replicas for all and those of single tenants."""
        return self.replica.count + sum(
            tenant.dedicated_replicas for tenant in self.tenants if tenant.isolation is Isolation.DEDICATED
        )

    @property
    def most_replicas(self) -> int:
        """The same with every deployment scaled up as far as it may be."""
        scaling = self.replica.autoscaling
        if scaling is None:
            return self.num_replicas
        dedicated = [one.dedicated_replicas for one in self.tenants if one.isolation is Isolation.DEDICATED]
        return sum(max(count, scaling.max_count) for count in (self.replica.count, *dedicated))

    @model_validator(mode="after")
    def _snapshots_stay_fresh(self) -> Self:
        if self.replica.snapshot_period_s >= self.redis.stale_after_s:
            raise ValueError(
                f"replica.snapshot_period_s ({self.replica.snapshot_period_s:g}) must be below redis.stale_after_s "
                f"({self.redis.stale_after_s:g}), else every snapshot is stale before the next one comes"
            )
        return self

    @classmethod
    def load(cls, path: Path) -> ServiceConfig:
        """Read and validate ``path``. Raises ConfigurationError that lists every bad setting."""
        try:
            with path.open(encoding="utf-8") as file:  # Of which YAML's messages tell the name.
                return cls.model_validate(yaml.load(file, Loader=_UniqueKeys))
        except OSError as error:
            raise ConfigurationError(f"--config {path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigurationError(f"--config {path} is not text in UTF-8") from error
        except yaml.YAMLError as error:
            raise ConfigurationError(f"--config {path} is not YAML: {error}") from error
        except ValidationError as error:
            lines = explain(error, cls)
            raise ConfigurationError(f"--config {path}:\n" + "\n".join(f"  {line}" for line in lines)) from error
