"""python -m cluster: the server's HTTP interface over Ray actors, on this machine or on a cluster that Ray knows."""

import argparse
import contextlib
import os

for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
    os.environ.setdefault(name, "1")        # the actors inherit it

import ray
from server.__main__ import serve
from server.app import create_app

from cluster.router import ClusterSettings, Router


def start(n_cpus, **options):
    """Ray on this machine, its sockets on a loopback address (Ray replaces 127.0.0.1); the actors find our modules."""
    ray.init(num_cpus=n_cpus, include_dashboard=False, _node_ip_address="127.0.0.2", object_store_memory=256 << 20,
             runtime_env={"env_vars": {name: os.environ[name] for name in ("PYTHONPATH", "OPENBLAS_NUM_THREADS",
                                                                           "OMP_NUM_THREADS") if name in os.environ}}, **options)


@contextlib.asynccontextmanager
async def cluster(settings, metrics):
    router = Router(settings, metrics)
    await router.ready()
    yield router
    await router.stop()


def main():
    parser = argparse.ArgumentParser(prog="python -m cluster", description=__doc__)
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--prefill", type=int, default=1, help="actors that read prompts")
    parser.add_argument("--decode", type=int, default=2, help="actors that write texts")
    parser.add_argument("--address", help="of a Ray cluster that runs; without it one is started here")
    args = parser.parse_args()
    settings = ClusterSettings(n_prefill=args.prefill, n_decode=args.decode)
    if args.address:
        ray.init(args.address)
    else:
        start(args.prefill + args.decode, log_to_driver=False)
    serve(create_app(lambda metrics: cluster(settings, metrics), settings.engine.timeout), args.port, 30)


if __name__ == "__main__":
    main()
