"""OpenTelemetry instruments of one process, and one Prometheus page from those of many."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import Meter
from opentelemetry.sdk.metrics import Histogram, MeterProvider
from opentelemetry.sdk.metrics.view import ExplicitBucketHistogramAggregation, View
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families

SECONDS_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
"""Bucket bounds of every histogram in seconds; OpenTelemetry's defaults are made for milliseconds."""


class Telemetry:
    """A meter provider with a Prometheus registry of its own, so that several can live in one process."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._provider = MeterProvider(
            metric_readers=[
                PrometheusMetricReader(disable_target_info=True, scope_info_enabled=False, registry=self._registry)
            ],
            views=[
                View(
                    instrument_type=Histogram,
                    instrument_unit="s",
                    aggregation=ExplicitBucketHistogramAggregation(SECONDS_BOUNDS),
                )
            ],
            shutdown_on_exit=False,
        )

    def meter(self, name: str) -> Meter:
        """A meter whose instruments appear in ``scrape``."""
        return self._provider.get_meter(name)

    def scrape(self) -> str:
        """All series in Prometheus text format."""
        return generate_latest(self._registry).decode()

    def close(self) -> None:
        """Stop the provider."""
        self._provider.shutdown()


@dataclass(frozen=True)
class _Page:
    """What ``generate_latest`` asks of a registry."""

    families: Mapping[str, Metric]

    def collect(self) -> Iterator[Metric]:
        """The families, each once."""
        yield from self.families.values()


def merge_expositions(pages: Iterable[tuple[str, str]]) -> str:
    """One Prometheus page of many: each family once, every series with a label ``replica``.

    Takes milliseconds of CPU per page.

    Args:
        pages: The value of the label, for series that do not have it yet, and the text format.
    """
    families: dict[str, Metric] = {}
    for replica, page in pages:
        for family in text_string_to_metric_families(page):
            merged = families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            for sample in family.samples:
                merged.samples.append(sample._replace(labels={"replica": replica, **sample.labels}))
    return generate_latest(_Page(families)).decode()
