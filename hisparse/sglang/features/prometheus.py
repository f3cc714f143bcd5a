"""Statistics of the cache on SGLang's Prometheus endpoint."""

from collections.abc import Callable
from typing import Any

from hisparse.cache.counters import CHOICES, COUNTERS, REQUESTS, CacheStats
from hisparse.sglang import features
from hisparse.sglang.features.base import Feature, Start
from hisparse.sglang.metrics import GAUGES, gauge_values
from hisparse.sglang.session import ServerSession, current_session


def _around_flush_cache(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Update the metrics after a flush, which frees the radix cache's host slots."""
    session = current_session()
    flushed = original(*args, **kwargs)
    if session is not None:
        session.backend.metrics.report(now=True)
    return flushed


def _rank_labels() -> dict[str, int]:
    """Labels of this process's metrics, as SGLang labels its own."""
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    labels = {"tp_rank": parallel.tp_rank}
    labels |= {} if parallel.dp_rank is None else {"dp_rank": parallel.dp_rank}
    labels |= {} if parallel.pp_size == 1 else {"pp_rank": parallel.pp_rank}
    return labels


class _Publisher:
    """Sets the metrics to the coordinator's statistics, without waiting for the device.

    Args:
        session: this rank's session, with its coordinator.
        model_runner: SGLang's ``ModelRunner``.
    """

    def __init__(self, session: ServerSession, model_runner: Any) -> None:
        # prometheus_client reads PROMETHEUS_MULTIPROC_DIR on import, and SGLang sets the variable
        # only before its schedulers start.
        from prometheus_client import Counter, Gauge
        from sglang.srt.runtime_context import get_serving

        self._session, self._allocator = session, model_runner.token_to_kv_pool_allocator
        self._features = features.enabled()
        texts = dict(COUNTERS)
        for extension in session.coordinator.extensions.values():
            texts |= extension.counters
        for feature in self._features:
            texts |= feature.counters
        labels = {"model_name": get_serving().served_model_name, **_rank_labels()}
        names = list(labels)
        by_choice = Counter("hisparse:requests", REQUESTS, [*names, "choice"])
        #: By name, or by name and the value of a label.
        self._counters: dict[Any, Counter] = {
            name: Counter(f"hisparse:{name}", text, names).labels(**labels)
            for name, text in texts.items()
        }
        for choice in CHOICES:
            self._counters["choice", choice] = by_choice.labels(**labels, choice=choice)
        self._published = dict.fromkeys(self._counters, 0)
        self._gauges = {
            name: Gauge(f"hisparse:{name}", text, names, multiprocess_mode="mostrecent").labels(
                **labels
            )
            for name, text in GAUGES.items()
        }

    def publish(self, stats: CacheStats) -> None:
        """Add what was counted since the last call."""
        session = self._session
        values: dict[Any, int] = {**vars(stats), **stats.extensions}
        values |= {("choice", choice): number for choice, number in stats.choices.items()}
        for feature in self._features:
            values |= feature.totals(session)
        for name, counter in self._counters.items():
            counter.inc(values[name] - self._published[name])
            self._published[name] = values[name]
        for name, value in gauge_values(stats, session.coordinator, self._allocator).items():
            self._gauges[name].set(value)


class Prometheus(Feature):
    """On with ``--enable-metrics``."""

    name = "prometheus"
    hooks = {"sglang.srt.managers.scheduler.Scheduler.flush_cache": _around_flush_cache}

    def is_on(self, start: Start) -> bool:
        """Whether SGLang has an endpoint."""
        return bool(start.args.enable_metrics)

    def built(self, session: ServerSession, model_runner: Any) -> None:
        """Publish from now on."""
        publisher = _Publisher(session, model_runner)
        session.publishers.append(publisher.publish)
        session.backend.metrics.report(now=True)


FEATURE = Prometheus()
