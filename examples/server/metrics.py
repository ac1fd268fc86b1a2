"""What /metrics tells."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics

disable_created_metrics()        # a line of its own for every counter otherwise

SECONDS = (.0005, .001, .002, .004, .008, .016, .032, .064, .128, .256, .512, 1, 2, 4, 8)


class Metrics:
    def __init__(self):
        self.registry = CollectorRegistry()
        counter = lambda name, text, labels=(): Counter(f"gdn_{name}", text, labels, registry=self.registry)
        histogram = lambda name, text: Histogram(f"gdn_{name}_seconds", text, registry=self.registry, buckets=SECONDS)
        self.requests = counter("requests", "requests by how they ended", ["outcome"])
        self.refused = counter("refused", "requests refused, by code", ["code"])
        self.prompt_tokens = counter("prompt_tokens", "prompt tokens run")
        self.output_tokens = counter("output_tokens", "tokens written")
        self.drafted = counter("drafted_tokens", "tokens drafted")
        self.accepted = counter("accepted_tokens", "drafted tokens that were right")
        self.prefix_hits = counter("prefix_hits", "requests that began from a kept state")
        self.prefix_tokens = counter("prefix_tokens", "prompt tokens that a kept state had seen")
        self.close_choices = counter("close_choices", "choices so close that rounding may have decided them")
        self.step_seconds = histogram("step", "seconds of a step")
        self.first_token_seconds = histogram("first_token", "seconds from request to first token")

    def watch(self, gauges):
        """Gauges [(name, text, function), ...] that are asked when they are read."""
        for name, text, read in gauges:
            Gauge(f"gdn_{name}", text, registry=self.registry).set_function(read)
