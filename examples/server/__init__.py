"""An HTTP server for the example model: see docs/SERVING.md."""
