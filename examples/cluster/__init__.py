"""The server's engine on several machines, with Ray: see docs/SERVING.md."""
