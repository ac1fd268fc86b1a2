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

    def watch(self, engine):
        """Gauges that ask the engine when they are read."""
        states = engine.states
        for name, text, read in [
            ("slots", "texts that can be written at once", lambda: states.n_active),
            ("slots_busy", "texts being written", lambda: len(engine.running)),
            ("slots_reading", "of them, those whose prompt is being read", lambda: engine.n_reading),
            ("queue", "requests waiting", lambda: len(engine.queue)),
            ("ring_free", "free slots of the ring, kept prefixes not counted", lambda: engine.ring.n_free),
            ("prefixes", "states of prefixes kept", lambda: len(engine.prefixes)),
            ("prefix_bytes", "of ring that they take", lambda: len(engine.prefixes) * states.slot_nbytes),
        ]:
            Gauge(f"gdn_{name}", text, registry=self.registry).set_function(read)
