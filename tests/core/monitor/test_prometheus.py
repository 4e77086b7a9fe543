"""The exported text as Prometheus' own parser reads it; dashboard, alerts and docs, built on the names."""

import json
import os
import re
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from starsd_edge.errors import ResourceError, UsageError
from starsd_edge.latency import Histogram
from starsd_edge.monitor.definitions import definitions_page
from starsd_edge.monitor.exporter import Exporter
from starsd_edge.monitor.exposition import Kind, Watched, exposition, sample_names
from starsd_edge.monitor.feed import Arrival
from starsd_edge.monitor.link_state import Link, LinkState
from starsd_edge.monitor.prometheus import METRICS
from starsd_edge.protocol.telemetry import DeviceSnapshot, ServiceSnapshot, Stage, Work

from .fleet import service_after

DOCS = Path(__file__).parents[3] / "docs"
DASHBOARD = DOCS / "monitoring" / "grafana-dashboard.json"
ALERTS = DOCS / "monitoring" / "alerts.yml"
EXPORTED = {name: metric for metric in METRICS for name in sample_names(metric)}
NAME = re.compile(r"\bstarsd_\w+")
SELECTOR = re.compile(r"\b(starsd_\w+)\{([^}]*)\}")
GROUPING = re.compile(r"\b(?:by|ignoring|on|without) \(([^)]*)\)")


def samples(*watched: Watched) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Every sample by name and labels, as the parser sees it."""
    families = list(text_string_to_metric_families(exposition(METRICS, watched)))
    found = [(s.name, frozenset(s.labels.items()), s.value) for family in families for s in family.samples]
    by_series = {(name, labels): value for name, labels, value in found}
    assert len(by_series) == len(found), "a series is exported twice"
    return by_series


def value(series: dict[tuple[str, frozenset[tuple[str, str]]], float], name: str, **labels: str) -> float:
    return series[name, frozenset({"service": "desk", **labels}.items())]


def test_the_parser_reads_every_family() -> None:
    text = exposition(METRICS, [Watched("desk", LinkState.UP, service_after(100.0, 4))])
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for metric in METRICS:
        family = families[metric.name.removesuffix("_total")]
        assert family.type == metric.kind.value
        assert family.documentation == metric.help


def test_every_metric_has_the_labels_it_says() -> None:
    for name, labels in samples(Watched("desk", LinkState.UP, service_after(100.0, 12))):
        wanted = {"service", *EXPORTED[name].labels} | ({"le"} if name.endswith("_bucket") else set())
        assert {label for label, _ in labels} == wanted, name


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_names_follow_the_conventions(metric: object) -> None:
    from starsd_edge.monitor.exposition import Metric

    assert isinstance(metric, Metric)
    assert (metric.kind is Kind.COUNTER) == metric.name.endswith("_total")
    assert metric.name.startswith("starsd_")
    assert (metric.kind is Kind.HISTOGRAM) == bool(metric.bounds)


def test_speculative_counters_have_the_meaning_of_vllm() -> None:
    """Two trees of 15 draft tokens; of one 3 were accepted, of the other 1."""
    work = Work(num_drafts=2, draft_tokens=30, accepted_tokens=4, accepted_per_depth=[2, 1, 1], tokens=6)
    snapshot = ServiceSnapshot("b", 1, 1.0, devices=[DeviceSnapshot("orin", work=work)])
    series = samples(Watched("desk", LinkState.UP, snapshot))
    drafts = value(series, "starsd_spec_num_drafts_total", device="orin")
    accepted = value(series, "starsd_spec_num_accepted_tokens_total", device="orin")
    assert (drafts, accepted) == (2, 4)
    assert 1 + accepted / drafts == 3.0  # mean acceptance length: 6 tokens in 2 rounds
    per_position = [
        value(series, "starsd_spec_num_accepted_tokens_per_pos_total", device="orin", position=str(p))
        for p in range(3)
    ]
    assert per_position == [2, 1, 1]


def test_histograms_are_cumulative_and_end_at_all() -> None:
    times = Histogram()
    for seconds in (0.0001, 0.003, 0.003, 5.0, 100.0):
        times.add(seconds)
    device = DeviceSnapshot("orin", work=Work(stages={Stage.LINK: times}))
    series = samples(Watched("desk", LinkState.UP, ServiceSnapshot("b", 1, 1.0, devices=[device])))
    buckets = {
        float(dict(labels)["le"]): count
        for (name, labels), count in series.items()
        if name == "starsd_stage_seconds_bucket"
    }
    counts = [buckets[bound] for bound in sorted(buckets)]
    assert counts == sorted(counts)
    assert (buckets[float("inf")], buckets[0.004096], buckets[0.002048]) == (5, 3, 1)
    assert value(series, "starsd_stage_seconds_count", device="orin", stage="link") == 5
    assert value(series, "starsd_stage_seconds_sum", device="orin", stage="link") == pytest.approx(105.0061)


def test_a_service_that_is_not_heard_says_why_and_nothing_else() -> None:
    series = samples(Watched("desk", LinkState.NO_ROUTE, None))
    assert value(series, "starsd_service_up") == 0
    assert value(series, "starsd_service_link_state", state="no route") == 1
    assert {name for name, _ in series} == {"starsd_service_up", "starsd_service_link_state"}


def test_a_board_that_says_nothing_has_no_series() -> None:
    snapshot = ServiceSnapshot("b", 1, 1.0, devices=[DeviceSnapshot("orin")])
    names = {name for name, _ in samples(Watched("desk", LinkState.UP, snapshot))}
    assert not any(name.startswith(("starsd_board", "starsd_energy")) for name in names)


def test_names_from_elsewhere_cannot_break_the_text() -> None:
    evil = 'a"b\\c\nstarsd_fake 1 \x1b[0m'
    snapshot = ServiceSnapshot("b", 1, 1.0, devices=[DeviceSnapshot(evil)])
    series = samples(Watched(evil, LinkState.UP, snapshot))
    assert not any(name == "starsd_fake" for name, _ in series)


class TestWhatIsBuiltOnTheNames:
    def expressions(self) -> list[str]:
        dashboard = json.loads(DASHBOARD.read_text())
        panels = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
        variables = [v["query"]["query"] for v in dashboard["templating"]["list"] if v["type"] == "query"]
        rules = [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]
        return panels + variables + [rule["expr"] for rule in rules]

    def test_every_metric_that_is_asked_for_is_exported(self) -> None:
        asked = {name for expression in self.expressions() for name in NAME.findall(expression)}
        assert asked <= set(EXPORTED)
        assert len(asked) > 25

    def test_every_label_that_is_asked_for_is_there(self) -> None:
        for expression in self.expressions():
            names = NAME.findall(expression)
            everywhere = {"service", "le", *(label for name in names for label in EXPORTED[name].labels)}
            for name, selector in SELECTOR.findall(expression):
                labels = set(re.findall(r"(\w+)=", selector))
                assert labels <= {"service", "le", *EXPORTED[name].labels}, expression
            for group in GROUPING.findall(expression):
                assert {label.strip() for label in group.split(",")} <= everywhere, expression

    def test_counters_are_asked_for_as_rates_and_gauges_are_not(self) -> None:
        for expression in self.expressions():
            for name in NAME.findall(expression):
                rated = re.search(rf"(rate|increase)\({name}\b", expression) is not None
                wanted = EXPORTED[name].kind is not Kind.GAUGE
                assert rated == wanted or expression.startswith("label_values"), expression

    def test_alerts_have_what_prometheus_and_people_need(self) -> None:
        (group,) = yaml.safe_load(ALERTS.read_text())["groups"]
        names = [rule["alert"] for rule in group["rules"]]
        assert len(set(names)) == len(names) >= 10
        for rule in group["rules"]:
            assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
            assert rule["labels"]["severity"] in ("critical", "warning", "info")
            assert rule["annotations"]["summary"]
            assert rule["expr"].count("(") == rule["expr"].count(")")
            used = set(re.findall(r"\$labels\.(\w+)", " ".join(rule["annotations"].values())))
            labels = {label for name in NAME.findall(rule["expr"]) for label in EXPORTED[name].labels}
            assert used <= {"service", *labels}

    def test_the_dashboard_has_a_place_for_every_panel(self) -> None:
        panels = json.loads(DASHBOARD.read_text())["panels"]
        taken: set[tuple[int, int]] = set()
        for panel in panels:
            at = panel["gridPos"]
            cells = {(at["x"] + dx, at["y"] + dy) for dx in range(at["w"]) for dy in range(at["h"])}
            assert not taken & cells, panel["title"]
            assert at["x"] + at["w"] <= 24
            taken |= cells
        assert len({panel["id"] for panel in panels}) == len(panels)

    def test_the_page_of_definitions_is_the_tables(self) -> None:
        page = DOCS / "metrics.md"
        if os.environ.get("STARSD_GOLDEN") == "write":
            page.write_text(definitions_page())
        assert page.read_text() == definitions_page()


class OneService:
    """A feed of one service that was heard once."""

    names = ("desk",)
    links = (Link(LinkState.UP),)
    probes = 0

    def __init__(self) -> None:
        self.polled = threading.Event()
        self._waiting = [Arrival(0, 0.0, 10, service_after(100.0, 2))]

    def poll(self, timeout_s: float, keyboard: int | None = None) -> list[Arrival]:
        arrivals, self._waiting = self._waiting, []
        if not arrivals:
            self.polled.set()
        return arrivals

    def close(self) -> None:
        pass


class TestExporter:
    def test_prometheus_gets_what_the_service_published(self) -> None:
        feed, done = OneService(), threading.Event()
        exporter = Exporter(feed, "127.0.0.1", 0)  # type: ignore[arg-type]
        thread = threading.Thread(target=exporter.run, args=(done.is_set,))
        thread.start()
        try:
            assert feed.polled.wait(20)
            address = f"http://127.0.0.1:{exporter.port}"
            with urllib.request.urlopen(f"{address}/metrics", timeout=20) as answer:
                text = answer.read().decode()
            with pytest.raises(urllib.error.HTTPError, match="404") as refused:
                urllib.request.urlopen(f"{address}/etc/passwd", timeout=20)
            refused.value.close()
        finally:
            done.set()
            thread.join()
        assert 'starsd_service_up{service="desk"} 1' in text
        assert text == exposition(METRICS, [Watched("desk", LinkState.UP, service_after(100.0, 2))])

    def test_metrics_stay_on_this_machine(self) -> None:
        with pytest.raises(UsageError, match="this machine only"):
            Exporter(OneService(), "0.0.0.0", 0)  # type: ignore[arg-type]

    def test_a_port_that_is_taken_is_named(self) -> None:
        exporter = Exporter(OneService(), "127.0.0.1", 0)  # type: ignore[arg-type]
        with pytest.raises(ResourceError, match=str(exporter.port)):
            Exporter(OneService(), "127.0.0.1", exporter.port)  # type: ignore[arg-type]
        exporter.run(lambda: True)
